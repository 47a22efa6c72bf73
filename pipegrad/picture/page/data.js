// data.js: unpacks timelines; pipegrad/picture/html_page.py packs them.
// A span is a number, its position in the columns. Spans of a track lie side by side, in order of
// time, and do not overlap. So a moment is hit by bisection, and a strip is a slice.

const data = JSON.parse(document.getElementById("data").textContent);
const kindNumber = Object.fromEntries(data.kinds.map((each, number) => [each.kind, number]));
const isCompute = (kind) => kind < data.compute;
const isWait = (kind) => data.waits.includes(kind);

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Int32Array(await new Response(stream).arrayBuffer());
}

async function unpack(packed, number) {
  const numbers = await inflate(packed.spans);
  const size = numbers.length / data.fields.length;
  const column = (name) => {
    const at = data.fields.indexOf(name) * size;
    return numbers.subarray(at, at + size);
  };
  const timeline = { ...packed, number, size, title: data.titles[number] };
  for (const name of data.fields) timeline[name] = column(name);
  Object.assign(timeline, times(packed, column("gap"), column("duration")));
  timeline.last = Math.max(...timeline.tracks.map((track) => (track.end > track.first ? timeline.end[track.end - 1] : 0)));
  timeline.memory = memory(packed, await inflate(packed.memory));
  timeline.path = path(timeline, await inflate(packed.path));
  timeline.kinds = new Set(timeline.kind.filter((_, span) => timeline.end[span] > timeline.begin[span]));
  timeline.several = packed.stage_to_rank.length > packed.num_ranks; // stages on a rank
  return timeline;
}

// Returns begin, end and rank of all spans, and the tracks with the slices that are theirs.
function times(packed, gaps, durations) {
  const begin = new Float64Array(gaps.length), end = new Float64Array(gaps.length);
  const ranks = new Int32Array(gaps.length), tracks = [];
  let first = 0;
  for (const [rank, beside, count] of packed.tracks) {
    let now = 0;
    for (let span = first; span < first + count; span++) {
      begin[span] = (now += gaps[span]) * packed.time_unit;
      end[span] = (now += durations[span]) * packed.time_unit;
    }
    tracks.push({ rank, beside: Boolean(beside), first, end: first + count });
    ranks.fill(rank, first, first + count);
    first += count;
  }
  return { begin, end, tracks, rank: ranks };
}

// Returns for each rank its points, and the most that any rank held.
function memory(packed, numbers) {
  const size = numbers.length / 2, ranks = [];
  let first = 0, most = 0;
  for (const count of packed.memory_counts) {
    const seconds = Float64Array.from(numbers.subarray(first, first + count), (n) => n * packed.time_unit);
    const bytes = Float64Array.from(numbers.subarray(size + first, size + first + count), (n) => n * packed.memory_unit);
    const peak = bytes.reduce((a, b) => Math.max(a, b), 0);
    ranks.push({ seconds, bytes, peak });
    most = Math.max(most, peak);
    first += count;
  }
  return { ranks, most };
}

// Returns the parts of the critical path, each with its track, in order of time.
function path(t, numbers) {
  const size = numbers.length / 4, unit = t.time_unit;
  return Array.from({ length: size }, (_, part) => {
    const [rank, beside, begin, end] = [0, 1, 2, 3].map((column) => numbers[column * size + part]);
    const tracks = t.tracks.filter((track) => track.rank === rank && track.beside === Boolean(beside));
    const track = tracks.find((each) => spanAt(t, each, ((begin + end) / 2) * unit) >= 0) ?? tracks[0];
    return { track, begin: begin * unit, end: end * unit };
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
