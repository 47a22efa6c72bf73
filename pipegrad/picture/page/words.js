// words.js: what is facts of a box: its name, its times, and the reason of a wait.

function duration(seconds, digits = 3) {
  if (data.time_unit === "units") return `${Number(seconds.toPrecision(digits))} ${seconds === 1 ? "unit" : "units"}`;
  const [size, unit] = [[1, "s"], [1e-3, "ms"]].find(([least]) => Math.abs(seconds) >= least * 0.9995) ?? [1e-6, "us"];
  return `${Number((seconds / size).toPrecision(digits))} ${unit}`;
}

function bytesInWords(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) (bytes /= 1024), unit++;
  return `${Number(bytes.toPrecision(3))} ${units[unit]}`;
}

// Returns the name of a span: 0F3 of a compute, otherwise its label or kind.
function nameOf(t, span) {
  const { kind, name } = data.kinds[t.kind[span]];
  if (isCompute(t.kind[span])) return `${t.stage[span]}${kind}${t.microbatch[span]}`;
  return t.labels[t.label[span]] || name;
}

function linesOf(t, span) {
  const lines = [[heading(t, span), "b"], ...detail(t, span).map((line) => [line, "span"])];
  if (isWait(t.kind[span])) lines.push(...reason(t, span).map((line) => [line, "span"]));
  lines.push([when(t, span), "soft"]);
  const twin = twinOf(t, span);
  if (twin) lines.push([twin, "soft"]);
  if (isOnPath(t, span)) lines.push(["On the critical path: the step waits for it.", "span"]);
  return lines;
}

function heading(t, span) {
  const kind = data.kinds[t.kind[span]].name, title = kind[0].toUpperCase() + kind.slice(1);
  if (isCompute(t.kind[span])) return `${nameOf(t, span)}: ${kind}`;
  return `${title}: ${duration(t.end[span] - t.begin[span])}`;
}

function detail(t, span) {
  const kind = data.kinds[t.kind[span]].kind, label = t.labels[t.label[span]], lines = [];
  const facts = [`rank ${t.rank[span]}`];
  if (kind === "transfer") facts[0] = `from rank ${t.rank[span]} to rank ${t.peer[span]}`;
  if (t.stage[span] >= 0) facts.push(`stage ${t.stage[span]}`);
  if (t.microbatch[span] >= 0) facts.push(`microbatch ${t.microbatch[span]}`);
  if (t.step_ends.length > 1) facts.push(`step ${t.step[span]}`);
  if (data.timelines.length > 1) facts.push(t.title);
  if (label && !isWait(t.kind[span])) lines.push(label);
  lines.push(facts.join(", "));
  return lines;
}

function when(t, span) {
  const begin = t.begin[span] - originOf(t), end = t.end[span] - originOf(t);
  return `${duration(begin, 7)} to ${duration(end, 7)}, takes ${duration(end - begin, 4)}`;
}

// Returns why a rank waited: what it waited for, what that rank did meanwhile, how long it travelled.
function reason(t, span) {
  const label = t.labels[t.label[span]], peer = t.peer[span], { kind } = data.kinds[t.kind[span]];
  const what = label || (kind === "wait for ranks" ? "the other ranks" : kind.replace("wait for ", "a "));
  const way = kind === "wait for send" ? "to" : "from";
  const lines = [`It waits for ${what}${peer >= 0 ? ` ${way} rank ${peer}` : ""}.`];
  const cause = besideOf(t, span);
  const begin = t.begin[span], end = t.end[span];
  const sent = cause >= 0 ? Math.min(Math.max(t.begin[cause], begin), end) : end;
  if (peer >= 0 && peer !== t.rank[span] && sent > begin) {
    const did = during(t, peer, begin, sent);
    if (did) lines.push(`For ${duration(sent - begin)} rank ${peer} was still at ${did}.`);
  }
  if (cause >= 0 && end > sent) {
    const what = { transfer: "the message was on its way", reduction: "the reduction ran" }[data.kinds[t.kind[cause]].kind];
    lines.push(`For ${duration(end - sent)} ${what ?? "the parameters were on their way"}.`);
  }
  return lines;
}

// Returns what a rank did in a while: the names of its longest spans, in order of time.
function during(t, rank, begin, end) {
  const hit = [];
  for (const track of t.tracks.filter((each) => each.rank === rank && !each.beside)) {
    for (let s = Math.max(bisect(t.begin, begin, track.first, track.end) - 1, track.first); s < track.end && t.begin[s] < end; s++) {
      const seconds = Math.min(t.end[s], end) - Math.max(t.begin[s], begin);
      if (seconds > 0.02 * (end - begin)) hit.push([s, seconds]);
    }
  }
  const longest = new Set([...hit].sort((a, b) => b[1] - a[1]).slice(0, 4));
  const names = hit.filter((each) => longest.has(each)).map(([s]) => (isWait(t.kind[s]) ? `a ${waitInWords(t, s)}` : nameOf(t, s)));
  const more = hit.length > longest.size ? [`${hit.length - longest.size} more`] : [];
  return [...names, ...more].join(", ").replace(/, ([^,]*)$/, " and $1");
}

function waitInWords(t, span) {
  const peer = t.peer[span];
  return peer >= 0 ? `wait for rank ${peer}` : data.kinds[t.kind[span]].name;
}

// Returns the transfer, reduction or parameter sync that a wait is for, or -1.
function besideOf(t, wait) {
  const kind = data.kinds[t.kind[wait]].kind, rank = t.rank[wait], peer = t.peer[wait];
  const wanted = kindNumber[{
    "wait for receive": "transfer", "wait for send": "transfer",
    "wait for reduction": "reduction", "wait for parameters": "parameter sync",
  }[kind]];
  const sender = kind === "wait for receive" ? peer : rank;
  if (wanted === undefined || sender < 0) return -1;
  let best = -1;
  for (const span of spansOf(t, sender, true)) {
    const fits = t.kind[span] === wanted && t.which[span] === t.which[wait]
      && (kind === "wait for parameters" || t.step[span] === t.step[wait])
      && (wanted !== kindNumber.transfer || t.microbatch[span] === t.microbatch[wait])
      && t.begin[span] < t.end[wait];
    if (fits && (best < 0 || t.end[span] > t.end[best])) best = span;
  }
  return best;
}

// Returns the span that another one had to wait for: it ended last before this one could begin.
function causeOf(t, span) {
  if (isWait(t.kind[span])) {
    const cause = besideOf(t, span);
    return cause >= 0 ? cause : before(t, t.peer[span], t.end[span]);
  }
  const compute = t.kind[span] === kindNumber.transfer ? maker(t, span) : -1;
  return compute >= 0 ? compute : before(t, t.rank[span], t.begin[span]);
}

// Returns the computes of a span's microbatch, in order of time: each needs what the one before it
// gave. The backward of weights gives nothing to others, and is not among them.
function chainOf(t, span) {
  const chain = [];
  for (let each = 0; each < t.size; each++) {
    if (isCompute(t.kind[each]) && t.kind[each] !== kindNumber.W && isOfSame(t, each, t, span)) chain.push(each);
  }
  return chain.sort((a, b) => t.begin[a] - t.begin[b] || t.end[a] - t.end[b]);
}

// Returns whether two spans are of one microbatch.
function isOfSame(t, span, other, chosen) {
  return t.microbatch[span] >= 0 && t.microbatch[span] === other.microbatch[chosen] && t.step[span] === other.step[chosen];
}

// Returns the last compute of the transfer's microbatch that ended before it began.
function maker(t, transfer) {
  let best = -1;
  for (const span of spansOf(t, t.rank[transfer], false)) {
    if (!isCompute(t.kind[span]) || t.kind[span] === kindNumber.W || t.microbatch[span] !== t.microbatch[transfer]) continue;
    if (t.end[span] <= t.begin[transfer] + 2 * NANOSECOND && t.step[span] === t.step[transfer]) best = span;
  }
  return best;
}

// Returns the last span of a rank that ended at a moment, or before.
function before(t, rank, seconds) {
  let best = -1;
  for (const track of t.tracks.filter((each) => each.rank === rank && !each.beside)) {
    const span = bisect(t.end, seconds + 2 * NANOSECOND, track.first, track.end) - 1;
    if (span >= track.first && (best < 0 || t.end[span] > t.end[best])) best = span;
  }
  return best;
}

// Returns how long the same thing took in the other timeline.
function twinOf(t, span) {
  const other = timelines.find((each) => each !== t);
  if (!other || t.rank[span] >= other.num_ranks) return "";
  const same = ["kind", "stage", "microbatch", "peer", "which", "step"];
  for (const twin of spansOf(other, t.rank[span], trackOf(t, span).beside)) {
    if (!same.every((name) => t[name][span] === other[name][twin])) continue;
    const mine = t.end[span] - t.begin[span], its = other.end[twin] - other.begin[twin];
    const change = its > 0 ? ((mine / its - 1) * 100).toFixed(1) : "0.0";
    const here = Number(change) ? ` (here ${change > 0 ? "+" : ""}${change.replace("-", "−")} %)` : "";
    return `${other.title}: ${duration(its)}${here}`;
  }
  return "";
}
