// page.js: the state of the view, and what mouse, keys and controls do with it.

const USUAL = [0.6, 2.4];
const element = (id) => document.getElementById(id);
const viewport = element("viewport"), tip = element("tip");
const view = {
  from: 0, to: 1, // seconds that are shown, from the begin of the step
  step: 0, // -1 for all
  layout: "paired", scale: 1, // of the height of a rank
  fitted: USUAL, // the least and the largest scale that fits all ranks into the window; null: chosen
  memory: true, path: true, arrows: false,
  hidden: new Set(), ranks: null, microbatches: null, text: "", // the filter
  hovered: null, chosen: null, // { t, span }, and the chain of the chosen one
};
const timelines = await Promise.all(data.timelines.map(unpack));
const painter = new Painter(element("canvas"));
let layout, requested = false, forPrint = null;

const longest = () => Math.max(...timelines.map(shownLength));
const numSteps = () => data.sentences.length - 1;
const usualStep = () => (numSteps() > 1 ? 0 : -1); // what is shown at first
const whole = () => longest() * (view.step < 0 ? 1.02 : 1) || 1;
const isWhole = () => view.from === 0 && view.to === whole();
const dark = matchMedia("(prefers-color-scheme: dark)");

// --- drawing

function redraw() {
  if (!requested) requestAnimationFrame(drawNow);
  requested = true;
}

function drawNow() {
  requested = false;
  const width = forPrint ?? viewport.clientWidth;
  if (view.fitted && !forPrint) view.scale = fittedScale();
  layout = arrange(view, width);
  viewport.style.height = `${Math.min(layout.height, room())}px`;
  element("spacer").style.height = `${layout.height}px`;
  const height = forPrint ? layout.height : viewport.clientHeight;
  writeAddress();
  painter.frame(layout, view, forPrint ? 0 : viewport.scrollTop, width, height, forPrint ? 2 : devicePixelRatio || 1);
}

// Filters: 0 hides a span, 1 dims it, 2 shows it.
function filter() {
  for (const t of timelines) {
    const names = t.labels.map((label) => label.toLowerCase().includes(view.text));
    t.mask = t.mask ?? new Uint8Array(t.size);
    for (let span = 0; span < t.size; span++) {
      if (view.hidden.has(t.kind[span])) t.mask[span] = 0;
      else {
        const fits = (!view.microbatches || view.microbatches(t.microbatch[span]))
          && (!view.text || names[t.label[span]] || nameOf(t, span).toLowerCase().includes(view.text));
        t.mask[span] = fits ? 2 : 1;
      }
    }
  }
  redraw();
}

// --- moving in time and among ranks

function show(from, to) {
  const most = longest() || 1, span = Math.min(Math.max(to - from, most * 1e-7), most * 1.04);
  view.from = Math.min(Math.max(from, -most * 0.01), Math.max(most * 1.03 - span, -most * 0.01));
  view.to = view.from + span;
  redraw();
}

function fit() {
  view.from = 0;
  view.to = whole();
  redraw();
}

function zoom(factor, at = 0.5) {
  const span = view.to - view.from, fixed = view.from + span * at;
  const wanted = Math.min(span * factor, whole());
  show(fixed - wanted * at, fixed + wanted * (1 - at));
}

const move = (part) => show(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));

function scaleRanks(scale) {
  const middle = viewport.scrollTop / Math.max(layout?.height ?? 1, 1);
  view.scale = Math.min(Math.max(scale, 0.02), 3);
  view.fitted = null;
  drawNow();
  viewport.scrollTop = middle * layout.height;
}

function fitRanks(fitted) {
  view.fitted = fitted;
  redraw();
}

// Returns how high the timeline may be: what is left of the window, but at least half of it.
function room() {
  return Math.max(innerHeight - viewport.offsetTop - 40, innerHeight / 2, 160);
}

function fittedScale() {
  let scale = 1;
  for (let turn = 0; turn < 4; turn++) { // from afar a rank has another form
    const { height } = arrange({ ...view, scale }, viewport.clientWidth);
    scale *= (room() - AXIS - 8) / (height - AXIS);
    scale = Math.min(Math.max(scale, view.fitted[0]), view.fitted[1]);
  }
  return scale;
}

function setStep(step) {
  view.step = step;
  element("step").value = step;
  element("step-before").disabled = step < 0;
  element("step-after").disabled = step >= numSteps() - 1;
  element("sentence").textContent = data.sentences[step + 1].join(" ");
  const only = step < 0 && numSteps() === 1 ? 0 : step; // the step whose path is in words
  element("path-words").replaceChildren(...timelines.flatMap((t) => (t.path_words[only] ? [pathLine(t, only)] : [])));
  element("shares").replaceChildren(sharesTable());
  fit();
}

const moveStep = (by) => numSteps() > 1 && setStep(Math.min(Math.max(view.step + by, -1), numSteps() - 1));

function pathLine(t, step) {
  const line = document.createElement("span");
  line.textContent = `Critical path${timelines.length > 1 ? ` of ${t.title}` : ""}: ${t.path_words[step]}.`;
  return line;
}

// --- choosing boxes

// Returns the box at a point of the page; a thin one may be two pixels away.
function boxAt(clientX, clientY) {
  const box = viewport.getBoundingClientRect(), x = clientX - box.left, y = clientY - box.top;
  const hit = y > AXIS && find(layout, x, y + viewport.scrollTop);
  if (!hit) return null;
  const { panel, group, track } = hit, scale = panel.width / (view.to - view.from);
  const seconds = (at) => view.from + (at - panel.left) / scale + originOf(group.t);
  const span = track ? [0, -2, 2].map((off) => spanAt(group.t, track, seconds(x + off))).find((each) => each >= 0) ?? -1 : -1;
  return { ...hit, t: group.t, span: span >= 0 && group.t.mask[span] ? span : -1, seconds: seconds(x) };
}

function linesAt(hit) {
  if (hit.span >= 0) return linesOf(hit.t, hit.span);
  if (hit.strip.what !== "memory") return [];
  const points = hit.t.memory.ranks[hit.group.rank];
  const point = bisect(points.seconds, hit.seconds, 0, points.seconds.length) - 1;
  const held = point >= 0 ? points.bytes[point] : 0;
  return [[`Memory: ${bytesInWords(held)}`, "b"], [`rank ${hit.group.rank}, at most ${bytesInWords(points.peak)}`, "span"],
    [`at ${duration(hit.seconds - originOf(hit.t), 5)}`, "soft"]];
}

function explain(lines, x, y, pinned) {
  tip.replaceChildren(...lines.map(([text, style]) => {
    const line = document.createElement(style === "b" ? "b" : "span");
    line.className = style;
    line.textContent = text;
    return line;
  }));
  tip.hidden = !lines.length;
  tip.classList.toggle("pinned", pinned);
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(Math.min(x + 14, innerWidth - width - 8), 8)}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(y - height - 12, 8) : y + 18}px`;
}

function hover(event) {
  const hit = boxAt(event.clientX, event.clientY);
  const hovered = hit && hit.span >= 0 ? { t: hit.t, span: hit.span } : null;
  if (hovered?.span !== view.hovered?.span || hovered?.t !== view.hovered?.t) redraw();
  view.hovered = hovered;
  if (!view.chosen) explain(hit ? linesAt(hit) : [], event.clientX, event.clientY, false);
}

// Chooses a box, brings it into view and says what it is, on the screen and to screen readers.
function choose(t, span) {
  view.chosen = span >= 0 ? { t, span, chain: chainOf(t, span) } : null;
  if (!view.chosen) {
    tip.hidden = true;
    return redraw();
  }
  const track = trackOf(t, span), begin = t.begin[span] - originOf(t), end = t.end[span] - originOf(t);
  if (end < view.from || begin > view.to) {
    const half = (view.to - view.from) / 2;
    show((begin + end) / 2 - half, (begin + end) / 2 + half);
  }
  drawNow();
  const panel = layout.panels.find((each) => each.spots.has(track)), spot = panel?.spots.get(track);
  if (!spot) return redraw();
  if (spot.y < viewport.scrollTop + AXIS) viewport.scrollTop = spot.y - AXIS - 10;
  if (spot.y + spot.height > viewport.scrollTop + viewport.clientHeight) viewport.scrollTop = spot.y - viewport.clientHeight / 2;
  const box = viewport.getBoundingClientRect(), lines = linesOf(t, span);
  const at = panel.left + ((Math.max(begin, view.from) - view.from) * panel.width) / (view.to - view.from);
  explain(lines, box.left + at, box.top + spot.y - viewport.scrollTop + spot.height - 8, true);
  element("spoken").textContent = lines.map(([text]) => text).join(". ");
  return redraw();
}

// Chooses the box before or after the chosen one that the filter shows.
function chooseBeside(step) {
  if (!view.chosen) return chooseFirst();
  const { t, span } = view.chosen, track = trackOf(t, span);
  let next = span + step;
  while (next >= track.first && next < track.end && t.mask[next] < 2) next += step;
  if (next >= track.first && next < track.end) choose(t, next);
  return undefined;
}

// Chooses the box above or below, at the same time.
function chooseTrack(step) {
  if (!view.chosen) return chooseFirst();
  const { t, span } = view.chosen, panel = layout.panels.find((each) => each.spots.has(trackOf(t, span)));
  const tracks = [...panel.spots.keys()], middle = (t.begin[span] + t.end[span]) / 2 - originOf(t);
  for (let at = tracks.indexOf(trackOf(t, span)) + step; at >= 0 && at < tracks.length; at += step) {
    const other = panel.spots.get(tracks[at]).group.t;
    const near = Math.max(bisect(other.begin, middle + originOf(other), tracks[at].first, tracks[at].end) - 1, tracks[at].first);
    if (tracks[at].end > tracks[at].first && other.mask[near]) return choose(other, near);
  }
  return undefined;
}

function chooseFirst() {
  for (const track of layout.panels[0].spots.keys()) {
    const { t } = layout.panels[0].spots.get(track).group;
    const first = bisect(t.end, view.from + originOf(t), track.first, track.end);
    if (first < track.end) return choose(t, first);
  }
  return undefined;
}

function zoomTo({ t, span }) {
  const begin = t.begin[span] - originOf(t), end = t.end[span] - originOf(t), room = (end - begin) * 6;
  show(begin - room, end + room);
}

// --- mouse

viewport.addEventListener("wheel", (event) => {
  const box = viewport.getBoundingClientRect(), x = event.clientX - box.left;
  const panel = layout.panels.find((each) => x >= each.left && x < each.left + each.width);
  const isZoom = event.ctrlKey || event.metaKey; // so is a pinch on a touchpad
  const isMove = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  if (!panel || !(isZoom || isMove)) return; // the browser scrolls
  event.preventDefault();
  const lines = event.deltaMode === 1 ? 16 : 1;
  if (isZoom) zoom(1.0018 ** (event.deltaY * lines), (x - panel.left) / panel.width);
  else move(((event.deltaX || event.deltaY) * lines) / panel.width);
}, { passive: false });

let drag = null;
viewport.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || event.offsetX > viewport.clientWidth) return;
  drag = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, top: viewport.scrollTop, moved: false };
});
addEventListener("pointermove", (event) => {
  if (!drag) return;
  const x = event.clientX - drag.x, y = event.clientY - drag.y;
  drag.moved ||= Math.abs(x) + Math.abs(y) > 4;
  if (!drag.moved) return;
  viewport.classList.add("dragged");
  if (!view.chosen) tip.hidden = true;
  const shift = (x * (drag.to - drag.from)) / layout.panels[0].width;
  if (event.pointerType === "mouse") viewport.scrollTop = drag.top - y; // fingers scroll by themselves
  show(drag.from - shift, drag.to - shift);
});
addEventListener("pointerup", (event) => {
  if (drag && !drag.moved) {
    const hit = boxAt(event.clientX, event.clientY);
    choose(hit?.t, hit?.span ?? -1);
  }
  drag = null;
  viewport.classList.remove("dragged");
});
addEventListener("pointercancel", () => {
  drag = null; // the browser scrolls
});
viewport.addEventListener("pointermove", (event) => drag?.moved || hover(event));
viewport.addEventListener("pointerleave", () => {
  view.hovered = null;
  if (!view.chosen) tip.hidden = true;
  redraw();
});
viewport.addEventListener("dblclick", () => view.chosen && zoomTo(view.chosen));
viewport.addEventListener("scroll", redraw);

// --- keys

const keys = {
  "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5), 0: fit,
  w: () => zoom(1 / 1.5), s: () => zoom(1.5), Home: fit,
  a: () => move(-0.2), d: () => move(0.2),
  ArrowLeft: () => chooseBeside(-1), ArrowRight: () => chooseBeside(1),
  ArrowUp: () => chooseTrack(-1), ArrowDown: () => chooseTrack(1),
  Enter: () => view.chosen && follow(view.chosen),
  Escape: () => choose(null, -1),
  "[": () => moveStep(-1), "]": () => moveStep(1),
  ",": () => scaleRanks(view.scale / 1.25), ".": () => scaleRanks(view.scale * 1.25), r: () => fitRanks([0.02, 3]),
  t: () => setTheme(), "?": () => element("help").click(),
  "/": () => {
    element("text").closest("details").open = true;
    element("text").focus();
  },
};

function follow({ t, span }) {
  const cause = causeOf(t, span);
  if (cause >= 0) choose(t, cause);
}

addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT)$/.test(event.target.tagName), pressed = /^(BUTTON|SUMMARY)$/.test(event.target.tagName);
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  if ((typing && event.key !== "Escape") || (pressed && event.key === "Enter")) return;
  if (typing) viewport.focus();
  event.preventDefault();
  keys[event.key]();
});

// --- controls

const press = (id, action) => element(id).addEventListener("click", action);
press("zoom-in", keys["+"]);
press("zoom-out", keys["-"]);
press("fit", fit);
press("taller", keys["."]);
press("lower", keys[","]);
press("fit-ranks", keys.r);
press("step-before", keys["["]);
press("step-after", keys["]"]);
press("theme", () => setTheme());
press("help", () => {
  element("keys").hidden = !element("keys").hidden;
  element("help").setAttribute("aria-expanded", !element("keys").hidden);
});

// Returns what "0-3, 7" says: a function that is true for these numbers; null for all.
function numbers(text) {
  if (!text.trim()) return null;
  const ranges = text.split(",").map((part) => {
    const hit = /^\s*(\d+)\s*(?:-\s*(\d+)\s*)?$/.exec(part);
    if (!hit) throw new Error(`“${part.trim()}” is no number and no range; write 3, 0-3 or 0-3, 7`);
    return [Number(hit[1]), Number(hit[2] ?? hit[1])];
  });
  return (number) => ranges.some(([low, high]) => number >= low && number <= high);
}

function readNumbers() {
  const problems = ["ranks", "microbatches"].flatMap((id) => {
    const input = element(id);
    let problem = "";
    try {
      view[id] = numbers(input.value);
    } catch (error) {
      problem = error.message;
    }
    input.classList.toggle("wrong", problem !== "");
    return problem || [];
  });
  element("problem").textContent = problems.join(" ");
  element("problem").hidden = !problems.length;
  element("shares").replaceChildren(sharesTable());
  filter();
}

for (const id of ["ranks", "microbatches"]) element(id).addEventListener("input", readNumbers);
element("text").addEventListener("input", (event) => {
  view.text = event.target.value.trim().toLowerCase();
  filter();
});
element("step").addEventListener("change", (event) => setStep(Number(event.target.value)));
element("layout").addEventListener("change", (event) => {
  view.layout = event.target.value;
  fitRanks(USUAL);
});

function setTheme(theme) {
  const now = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = theme ?? (now === "dark" ? "light" : "dark");
  legend();
  redraw();
}

// One entry for each thing that the timelines have; all but "idle" hide and show it.
function legend() {
  const has = (number) => timelines.some((t) => t.kinds.has(number));
  const kinds = data.kinds.flatMap((kind, number) => {
    if (!has(number)) return [];
    const name = `${isCompute(number) ? `${kind.kind} ` : ""}${kind.name}`;
    return [entry(name, swatch(kind), () => !view.hidden.has(number), () => {
      if (!view.hidden.delete(number)) view.hidden.add(number);
      filter();
    }, { kind: kind.kind })];
  });
  const others = [
    ["path", "critical path: what the end of the step waited for", timelines.some((t) => t.path.length)],
    ["memory", "memory", timelines.some((t) => t.memory.most)],
    ["arrows", "arrows of messages", has(kindNumber.transfer)],
  ].flatMap(([name, text, isThere]) => (isThere ? [entry(text, mark(name === "arrows" ? "→" : ""), () => view[name], () => {
    view[name] = !view[name];
    redraw();
  }, { id: `show-${name}` })] : []));
  const idle = document.createElement("li");
  Object.assign(idle, { id: "idle", className: "idle" });
  idle.append(mark(""), "idle: part of a bubble");
  element("legend").replaceChildren(...kinds, idle, ...others);
}

// Returns a button of the legend; `press` changes what `isOn` returns.
function entry(text, sign, isOn, press, { kind, id = "" }) {
  const item = document.createElement("li"), button = document.createElement("button");
  button.append(sign, text);
  button.id = id;
  if (kind) button.dataset.kind = kind;
  button.setAttribute("aria-pressed", isOn());
  button.addEventListener("click", () => {
    press();
    button.setAttribute("aria-pressed", isOn());
  });
  item.append(button);
  return item;
}

function mark(text) {
  const sign = document.createElement("span");
  sign.className = "mark";
  sign.textContent = text;
  return sign;
}

function swatch(kind) {
  const canvas = document.createElement("canvas"), ratio = devicePixelRatio || 1, context = canvas.getContext("2d");
  Object.assign(canvas, { width: 18 * ratio, height: 12 * ratio });
  Object.assign(canvas.style, { width: "18px", height: "12px" });
  context.scale(ratio, ratio);
  fillLike(context, kind, kind.is_hatched && hatching(context, kind, ratio), themeColours().hatch, (style) => {
    context.fillStyle = style;
    context.fillRect(0, 0, 18, 12);
  });
  return canvas;
}

// --- printing: all ranks, light, on white paper

addEventListener("beforeprint", () => {
  forPrint = 1400;
  view.themeBefore = document.documentElement.dataset.theme;
  setTheme("light");
  drawNow();
});
addEventListener("afterprint", () => {
  forPrint = null;
  setTheme(view.themeBefore);
});

// --- the shares of the ranks, as a table

const MOST_IN_TABLE = 64; // ranks

function sharesTable() {
  const table = document.createElement("table"), several = timelines.length > 1;
  const kinds = data.kinds.flatMap((kind, number) => (!data.beside.includes(number) && timelines.some((t) => t.kinds.has(number)) ? [number] : []));
  table.createCaption().textContent = "Shares of the time in percent";
  const add = (line, texts, head) => texts.forEach((text, at) => {
    const cell = document.createElement(head || at === 0 ? "th" : "td");
    cell.scope = head ? "col" : "row";
    cell.textContent = text;
    line.append(cell);
  });
  add(table.createTHead().insertRow(), ["rank", ...kinds.map((kind) => data.kinds[kind].name), "bubble"], true);
  const body = table.createTBody(), all = ordered(timelines, { ...view, layout: "paired" });
  for (const [t, rank] of all.slice(0, MOST_IN_TABLE)) {
    const shares = sharesOf(t, rank), computes = shares.slice(0, data.compute).reduce((a, b) => a + b);
    const percents = [...kinds.map((kind) => shares[kind]), 1 - computes].map((share) => (100 * share).toFixed(share < 0.0995 ? 1 : 0));
    add(body.insertRow(), [several ? `${rank}, ${t.title}` : rank, ...percents], false);
  }
  if (all.length > MOST_IN_TABLE) add(body.insertRow(), [`and ${all.length - MOST_IN_TABLE} more`], false);
  return table;
}

// Returns for each kind its share of the time of a rank, in the step that is shown.
function sharesOf(t, rank) {
  const begin = originOf(t), end = view.step < 0 ? (t.step_ends.at(-1) ?? t.last) : begin + shownLength(t), shares = data.kinds.map(() => 0);
  for (const span of spansOf(t, rank, false)) {
    shares[t.kind[span]] += Math.max(Math.min(t.end[span], end) - Math.max(t.begin[span], begin), 0) / (end - begin || 1);
  }
  return shares;
}

// --- begin

function usualLayout() {
  const [first, second] = timelines;
  return !second || (first.num_ranks === second.num_ranks && first.source !== second.source) ? "paired" : "stacked";
}

function begin() {
  element("layout-choice").hidden = timelines.length < 2;
  element("step-choice").hidden = numSteps() < 2;
  element("step").append(new Option(`all ${numSteps()} steps`, -1), ...Array.from({ length: numSteps() }, (_, step) => new Option(`step ${step}`, step)));
  const notes = new Set(timelines.flatMap((t) => Object.entries(t.notes).map(([name, text]) => `${name.replaceAll("_", " ")}: ${text}`)));
  element("notes").textContent = [...notes].map((each) => `${each[0].toUpperCase()}${each.slice(1)}.`).join(" ");
  for (const each of document.querySelectorAll("details")) each.open = innerWidth > 700;
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  new ResizeObserver(redraw).observe(viewport);
  addEventListener("resize", redraw);
  addEventListener("hashchange", () => fromAddress(location.hash.slice(1)));
  fromAddress(location.hash.slice(1));
}

begin();

// For scripts and tests: what is shown, where a box is, and what a frame took.
window.picture = {
  view, timelines, drawn,
  drawNow() {
    drawNow();
    return { ...drawn };
  },
  // Returns the middle of a box on the page, or null if it is out of view.
  locate(number, span) {
    const t = timelines[number], track = trackOf(t, span), box = viewport.getBoundingClientRect();
    const panel = layout.panels.find((each) => each.spots.has(track)), spot = panel?.spots.get(track);
    const middle = ((Math.max(t.begin[span] - originOf(t), view.from) + Math.min(t.end[span] - originOf(t), view.to)) / 2 - view.from);
    return spot && { x: box.left + panel.left + (middle * panel.width) / (view.to - view.from), y: box.top + spot.y + spot.height / 2 - viewport.scrollTop };
  },
};
document.documentElement.dataset.ready = "true";
