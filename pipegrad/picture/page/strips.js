// strips.js: where everything is. A panel is a part of the canvas with a time axis; a group is what is
// shown of one rank of one timeline; a strip is the rank, what runs beside it, or its memory.

const AXIS = 26, MARGIN = 12; // pixels
const HEIGHTS = { rank: 26, beside: 12, memory: 18, gap: 12 }; // pixels at scale 1
const AFAR = 0.4; // a lower scale leaves no room to show more than what ranks do

// Returns { panels, height }: each panel has groups, and a Map from a track to where it is.
function arrange(view, width) {
  const blocks = view.layout === "beside" ? timelines.map((t) => [t]) : [timelines];
  const share = width / blocks.length;
  const panels = blocks.map((block, number) => {
    const gutter = share < 520 ? 78 : 118; // for the names of the ranks
    const left = number * share + gutter;
    const panel = { left, gutter, width: Math.max(share - gutter - MARGIN, 50), groups: [], spots: new Map() };
    panel.height = fill(panel, ordered(block, view), view);
    return panel;
  });
  return { panels, height: Math.max(...panels.map((panel) => panel.height)) };
}

// Returns timelines with ranks, from top to bottom.
function ordered(block, view) {
  const all = block.flatMap((t) => Array.from({ length: t.num_ranks }, (_, rank) => [t, rank]));
  if (view.layout === "paired") all.sort((a, b) => a[1] - b[1] || a[0].number - b[0].number);
  return all.filter(([, rank]) => !view.ranks || view.ranks(rank));
}

// Puts the groups into a panel, and returns where the last one ends.
function fill(panel, groups, view) {
  let y = AXIS + 6;
  for (const [number, [t, rank]] of groups.entries()) {
    const pair = view.layout === "paired" && groups[number + 1]?.[1] === rank;
    const gap = (pair ? 0.25 : 1) * HEIGHTS.gap * view.scale * (view.scale < AFAR ? 0.3 : 1);
    const group = { t, rank, number, gap, y, strips: [] };
    for (const [what, tracks] of stripsOf(t, rank, view)) {
      if (group.strips.length) y += 2;
      const tall = HEIGHTS[what] * view.scale, strip = { what, y, height: tall * Math.max(tracks.length, 1), tracks };
      tracks.forEach((track, at) => {
        const space = what === "beside" && tall > 4 ? 1 : 0;
        panel.spots.set(track, { y: y + at * tall, height: tall - space, group });
      });
      group.strips.push(strip);
      y += strip.height;
    }
    group.height = y - group.y;
    panel.groups.push(group);
    y += gap;
  }
  return y;
}

function stripsOf(t, rank, view) {
  const main = t.tracks.filter((track) => track.rank === rank && !track.beside);
  const beside = t.tracks.filter((track) => track.rank === rank && track.beside);
  const isShown = data.beside.some((kind) => t.kinds.has(kind) && !view.hidden.has(kind));
  if (view.scale < AFAR) return [["rank", main]];
  return [
    ["rank", main],
    ...(isShown && beside.length ? [["beside", beside]] : []),
    ...(view.memory && t.memory.most ? [["memory", []]] : []),
  ];
}

// Returns what lies at a point of the whole, not of what is scrolled into view.
function find(layout, x, y) {
  const panel = layout.panels.find((each) => x >= each.left && x < each.left + each.width);
  const group = panel?.groups.find((each) => y >= each.y && y < each.y + each.height);
  const strip = group?.strips.find((each) => y >= each.y && y < each.y + each.height);
  return strip && { panel, group, strip, track: strip.tracks[Math.floor(((y - strip.y) / strip.height) * strip.tracks.length)] };
}

// Returns the first moment of the step that is shown; 0 for all steps.
function originOf(t) {
  return view.step > 0 ? (t.step_ends[view.step - 1] ?? t.last) : 0;
}

// Returns how long a timeline is shown: to its last step's end, and what still runs then.
function shownLength(t) {
  return view.step < 0 ? t.last : (t.step_ends[view.step] ?? t.last) - originOf(t);
}
