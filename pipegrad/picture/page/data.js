// data.js: unpacks timelines; pipegrad/picture/html_page.py packs them.
// A span is a number, its position in the columns. Spans of a track lie side by side, in order of
// time, and do not overlap. So a moment is hit by bisection, and a strip is a slice.

const data = JSON.parse(document.getElementById("data").textContent);
const kindNumber = Object.fromEntries(data.kinds.map((each, number) => [each.kind, number]));
const NANOSECOND = 1e-9; // times are rounded to it
const isCompute = (kind) => kind < data.compute;
const isWait = (kind) => data.waits.includes(kind);

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

async function unpack(head, number) {
  const packed = await inflate(head.packed);
  const timeline = { ...head, number, size: packed.spans[0].length, title: data.titles[number] };
  const columns = Object.fromEntries(data.fields.map((name, column) => [name, packed.spans[column]]));
  for (const name of data.fields) timeline[name] = Int32Array.from(columns[name]);
  timeline.begin = seconds(columns.begin);
  timeline.end = seconds(columns.begin.map((begin, span) => begin + columns.duration[span]));
  Object.assign(timeline, tracksOf(head.tracks, timeline.size));
  timeline.last = Math.max(...timeline.tracks.map((track) => (track.end > track.first ? timeline.end[track.end - 1] : 0)));
  timeline.memory = memory(packed.memory);
  timeline.path = path(timeline, packed.path);
  timeline.kinds = new Set(timeline.kind.filter((_, span) => timeline.end[span] > timeline.begin[span]));
  timeline.several = head.stage_to_rank.length > head.num_ranks; // stages on a rank
  return timeline;
}

// Returns seconds of whole nanoseconds.
function seconds(numbers) {
  return Float64Array.from(numbers, (each) => each * NANOSECOND);
}

// Returns the tracks with the slices that are theirs, and the rank of each span.
function tracksOf(packed, size) {
  const rank = new Int32Array(size), tracks = [];
  let first = 0;
  for (const [own, beside, count] of packed) {
    tracks.push({ rank: own, beside, first, end: first + count });
    rank.fill(own, first, first + count);
    first += count;
  }
  return { tracks, rank };
}

// Returns for each rank its points, and the most that any rank held.
function memory(packed) {
  const ranks = packed.map((points) => {
    const bytes = Float64Array.from(points, (point) => point[1]);
    return { seconds: seconds(points.map((point) => point[0])), bytes, peak: bytes.reduce((a, b) => Math.max(a, b), 0) };
  });
  return { ranks, most: ranks.reduce((most, own) => Math.max(most, own.peak), 0) };
}

// Returns the parts of the critical path, each with its track, in order of time.
function path(t, parts) {
  return parts.map(([rank, beside, ...ends]) => {
    const [begin, end] = seconds(ends);
    const tracks = t.tracks.filter((track) => track.rank === rank && track.beside === beside);
    const track = tracks.find((each) => spanAt(t, each, (begin + end) / 2) >= 0) ?? tracks[0];
    return { track, begin, end };
  });
}

function isOnPath(t, span) {
  const track = trackOf(t, span), edge = 1e-3 * (t.end[span] - t.begin[span]);
  return t.path.some((part) => part.track === track && part.end > t.begin[span] + edge && part.begin < t.end[span] - edge);
}

// Returns the first position from `first` to `end` whose value is above `value`.
function bisect(values, value, first, end) {
  while (first < end) {
    const middle = (first + end) >> 1;
    if (values[middle] > value) end = middle;
    else first = middle + 1;
  }
  return first;
}

// Returns the span of a track at a moment, or -1.
function spanAt(timeline, track, seconds) {
  const span = bisect(timeline.begin, seconds, track.first, track.end) - 1;
  return span >= track.first && timeline.end[span] > seconds ? span : -1;
}

function trackOf(timeline, span) {
  return timeline.tracks.find((track) => span >= track.first && span < track.end);
}

function* spansOf(timeline, rank, beside) {
  for (const track of timeline.tracks) {
    if (track.rank !== rank || track.beside !== beside) continue;
    for (let span = track.first; span < track.end; span++) yield span;
  }
}
