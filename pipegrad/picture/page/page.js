// page.js: the state of the view, and what mouse, keys and controls do with it.

const element = (id) => document.getElementById(id);
const viewport = element("viewport"), tip = element("tip");
const view = {
  from: 0, to: 1, // seconds that are shown, from the begin of the step
  step: -1, // a step, or -1 for all
  layout: "paired", scale: 1, // of the height of rows
  beside: true, memory: true, path: true, arrows: false,
  hidden: new Set(), ranks: null, microbatches: null, text: "", // the filter
  hovered: null, chosen: null, // { t, span }
};
const timelines = await Promise.all(data.timelines.map(unpack));
const painter = new Painter(element("canvas"));
let layout, requested = false, forPrint = null;

const longest = () => Math.max(...timelines.map(shownLength));
const dark = matchMedia("(prefers-color-scheme: dark)");

// --- drawing

function redraw() {
  if (!requested) requestAnimationFrame(drawNow);
  requested = true;
}

function drawNow() {
  requested = false;
  const width = forPrint ?? viewport.clientWidth;
  layout = arrange(view, width);
  element("spacer").style.height = `${layout.height}px`;
  const height = forPrint ? layout.height : viewport.clientHeight;
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
  const whole = longest() || 1, span = Math.min(Math.max(to - from, whole * 1e-7), whole * 1.04);
  view.from = Math.min(Math.max(from, -whole * 0.01), Math.max(whole * 1.03 - span, -whole * 0.01));
  view.to = view.from + span;
  redraw();
}

const fit = () => show(0, longest() * 1.02);

function zoom(factor, at = 0.5) {
  const span = view.to - view.from, fixed = view.from + span * at;
  const wanted = Math.min(span * factor, longest() * 1.02);
  show(fixed - wanted * at, fixed + wanted * (1 - at));
}

const move = (part) => show(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));

function scaleRows(scale) {
  const middle = viewport.scrollTop / Math.max(layout?.height ?? 1, 1);
  view.scale = Math.min(Math.max(scale, 0.02), 3);
  drawNow();
  viewport.scrollTop = middle * layout.height;
}

// Gives rows the height at which all ranks are in view, but at least and at most so much.
function fitRows(least = 0, most = 3) {
  for (let turn = 0; turn < 4; turn++) { // from afar rows have another form
    const { height } = arrange(view, viewport.clientWidth);
    view.scale *= (viewport.clientHeight - AXIS - 8) / (height - AXIS);
    view.scale = Math.min(Math.max(view.scale, least), most);
  }
  scaleRows(view.scale);
}

function setStep(step) {
  view.step = step;
  element("step").value = step;
  element("sentence").textContent = data.sentences[step + 1].join(" ");
  const only = step < 0 && data.sentences.length === 2 ? 0 : step; // the step whose path is told
  element("path-words").replaceChildren(...timelines.flatMap((t) => (t.path_words[only] ? [pathLine(t, only)] : [])));
  fit();
}

function pathLine(t, step) {
  const line = document.createElement("span");
  line.textContent = `Critical path${timelines.length > 1 ? ` of ${t.title}` : ""}: ${t.path_words[step]}.`;
  line.title = line.textContent; // a long one is cut
  return line;
}

// --- choosing boxes

// Returns the box at a point of the page; a thin one may be two pixels away.
function boxAt(clientX, clientY) {
  const box = viewport.getBoundingClientRect(), x = clientX - box.left, y = clientY - box.top;
  const found = y > AXIS && find(layout, x, y + viewport.scrollTop);
  if (!found) return null;
  const { panel, group, lane } = found, scale = panel.width / (view.to - view.from);
  const seconds = (at) => view.from + (at - panel.left) / scale + originOf(group.t);
  const span = lane ? [0, -2, 2].map((off) => spanAt(group.t, lane, seconds(x + off))).find((each) => each >= 0) ?? -1 : -1;
  return { ...found, t: group.t, span: span >= 0 && group.t.mask[span] ? span : -1, seconds: seconds(x) };
}

function linesAt(found) {
  if (found.span >= 0) return linesOf(found.t, found.span);
  if (found.row.what !== "memory") return [];
  const points = found.t.memory.ranks[found.group.rank];
  const point = bisect(points.seconds, found.seconds, 0, points.seconds.length) - 1;
  const held = point >= 0 ? points.bytes[point] : 0;
  return [[`Memory: ${bytesInWords(held)}`, "b"], [`rank ${found.group.rank}, at most ${bytesInWords(points.peak)}`, "span"],
    [`at ${duration(found.seconds - originOf(found.t), 5)}`, "soft"]];
}

function say(lines, x, y, kept) {
  tip.replaceChildren(...lines.map(([text, style]) => {
    const line = document.createElement(style === "b" ? "b" : "span");
    line.className = style;
    line.textContent = text;
    return line;
  }));
  tip.hidden = !lines.length;
  tip.classList.toggle("kept", kept);
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(Math.min(x + 14, innerWidth - width - 8), 8)}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(y - height - 12, 8) : y + 18}px`;
}

function hover(event) {
  const found = boxAt(event.clientX, event.clientY);
  const hovered = found && found.span >= 0 ? { t: found.t, span: found.span } : null;
  if (hovered?.span !== view.hovered?.span || hovered?.t !== view.hovered?.t) redraw();
  view.hovered = hovered;
  if (!view.chosen) say(found ? linesAt(found) : [], event.clientX, event.clientY, false);
}

// Chooses a box, brings it into view and says what it is, on the screen and to screen readers.
function choose(t, span) {
  view.chosen = span >= 0 ? { t, span } : null;
  if (!view.chosen) {
    tip.hidden = true;
    return redraw();
  }
  const lane = laneOf(t, span), begin = t.begin[span] - originOf(t), end = t.end[span] - originOf(t);
  if (end < view.from || begin > view.to) {
    const half = (view.to - view.from) / 2;
    show((begin + end) / 2 - half, (begin + end) / 2 + half);
  }
  drawNow();
  const panel = layout.panels.find((each) => each.places.has(lane)), place = panel?.places.get(lane);
  if (!place) return redraw();
  if (place.y < viewport.scrollTop + AXIS) viewport.scrollTop = place.y - AXIS - 10;
  if (place.y + place.height > viewport.scrollTop + viewport.clientHeight) viewport.scrollTop = place.y - viewport.clientHeight / 2;
  const box = viewport.getBoundingClientRect(), lines = linesOf(t, span);
  const at = panel.left + ((Math.max(begin, view.from) - view.from) * panel.width) / (view.to - view.from);
  say(lines, box.left + at, box.top + place.y - viewport.scrollTop + place.height - 8, true);
  element("spoken").textContent = lines.map(([text]) => text).join(". ");
  return redraw();
}

// Chooses the box before or after the chosen one that the filter shows.
function chooseBeside(step) {
  if (!view.chosen) return chooseFirst();
  const { t, span } = view.chosen, lane = laneOf(t, span);
  let next = span + step;
  while (next >= lane.first && next < lane.end && t.mask[next] < 2) next += step;
  if (next >= lane.first && next < lane.end) choose(t, next);
  return undefined;
}

// Chooses the box above or below, at the same time.
function chooseRow(step) {
  if (!view.chosen) return chooseFirst();
  const { t, span } = view.chosen, panel = layout.panels.find((each) => each.places.has(laneOf(t, span)));
  const lanes = [...panel.places.keys()], middle = (t.begin[span] + t.end[span]) / 2 - originOf(t);
  for (let at = lanes.indexOf(laneOf(t, span)) + step; at >= 0 && at < lanes.length; at += step) {
    const other = panel.places.get(lanes[at]).group.t;
    const near = Math.max(bisect(other.begin, middle + originOf(other), lanes[at].first, lanes[at].end) - 1, lanes[at].first);
    if (lanes[at].end > lanes[at].first && other.mask[near]) return choose(other, near);
  }
  return undefined;
}

function chooseFirst() {
  for (const lane of layout.panels[0].places.keys()) {
    const { t } = layout.panels[0].places.get(lane).group;
    const first = bisect(t.end, view.from + originOf(t), lane.first, lane.end);
    if (first < lane.end) return choose(t, first);
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
  if (!panel || event.altKey) return; // the browser scrolls
  event.preventDefault();
  const lines = event.deltaMode === 1 ? 16 : 1;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    move((((event.shiftKey && event.deltaY) || event.deltaX) * lines) / panel.width);
  } else zoom(1.0018 ** (event.deltaY * lines), (x - panel.left) / panel.width);
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
  viewport.scrollTop = drag.top - y;
  show(drag.from - shift, drag.to - shift);
});
addEventListener("pointerup", (event) => {
  if (drag && !drag.moved) {
    const found = boxAt(event.clientX, event.clientY);
    choose(found?.t, found?.span ?? -1);
  }
  drag = null;
  viewport.classList.remove("dragged");
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
  a: () => move(-0.2), d: () => move(0.2),
  ArrowLeft: () => chooseBeside(-1), ArrowRight: () => chooseBeside(1),
  ArrowUp: () => chooseRow(-1), ArrowDown: () => chooseRow(1),
  Enter: () => view.chosen && follow(view.chosen),
  Escape: () => choose(null, -1),
  "[": () => setStep(Math.max(view.step - 1, -1)),
  "]": () => setStep(Math.min(view.step + 1, data.sentences.length - 2)),
  ",": () => scaleRows(view.scale / 1.25), ".": () => scaleRows(view.scale * 1.25), r: () => fitRows(),
  "/": () => element("text").focus(), t: () => setTheme(), "?": () => element("help").click(),
};

function follow({ t, span }) {
  const cause = causeOf(t, span);
  if (cause >= 0) choose(t, cause);
}

addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|BUTTON)$/.test(event.target.tagName);
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  if (typing && event.key !== "Escape") return;
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
press("fit-rows", () => fitRows());
press("theme", () => setTheme());
press("help", () => {
  element("keys").hidden = !element("keys").hidden;
  element("help").setAttribute("aria-expanded", !element("keys").hidden);
});

for (const [id, name] of [["show-beside", "beside"], ["show-memory", "memory"], ["show-path", "path"], ["show-arrows", "arrows"]]) {
  element(id).addEventListener("change", (event) => {
    view[name] = event.target.checked;
    redraw();
  });
}

// Returns what "0-3, 7" says: a function that is true for these numbers; null for all.
function numbers(text) {
  if (!text.trim()) return null;
  const ranges = text.split(",").map((part) => {
    const found = /^\s*(\d+)\s*(?:-\s*(\d+)\s*)?$/.exec(part);
    if (!found) throw new Error(`“${part.trim()}” is no number and no range; write 3, 0-3 or 0-3, 7`);
    return [Number(found[1]), Number(found[2] ?? found[1])];
  });
  return (number) => ranges.some(([low, high]) => number >= low && number <= high);
}

for (const id of ["ranks", "microbatches"]) {
  element(id).addEventListener("input", (event) => {
    const problem = element("problem");
    try {
      view[id] = numbers(event.target.value);
      problem.hidden = true;
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
    event.target.classList.toggle("wrong", !problem.hidden);
    filter();
  });
}
element("text").addEventListener("input", (event) => {
  view.text = event.target.value.trim().toLowerCase();
  filter();
});
element("step").addEventListener("change", (event) => setStep(Number(event.target.value)));
element("layout").addEventListener("change", (event) => {
  view.layout = event.target.value;
  fitRows(0.6, 1.4);
});

function setTheme(theme) {
  const now = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = theme ?? (now === "dark" ? "light" : "dark");
  legend();
  redraw();
}

// One button for each kind that the timelines have; it hides and shows the kind.
function legend() {
  const present = new Set(timelines.flatMap((t) => [...new Set(t.kind)]));
  element("legend").replaceChildren(...data.kinds.flatMap((kind, number) => {
    if (!present.has(number)) return [];
    const item = document.createElement("li"), button = document.createElement("button");
    const letter = isCompute(number) ? `${kind.kind} ` : "";
    button.append(swatch(kind), `${letter}${kind.name}`);
    button.dataset.kind = kind.kind;
    button.setAttribute("aria-pressed", !view.hidden.has(number));
    button.addEventListener("click", () => {
      if (!view.hidden.delete(number)) view.hidden.add(number);
      button.setAttribute("aria-pressed", !view.hidden.has(number));
      filter();
    });
    item.append(button);
    return [item];
  }));
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

// --- begin

function begin() {
  const [first, second] = timelines, steps = data.sentences.length - 1;
  const alike = second && first.num_ranks === second.num_ranks && first.source !== second.source;
  view.layout = alike || !second ? "paired" : "stacked";
  element("layout").value = view.layout;
  element("layout-choice").hidden = !second;
  element("memory-choice").hidden = timelines.every((t) => !t.memory.most);
  element("path-choice").hidden = timelines.every((t) => !t.path.length);
  element("step-choice").hidden = steps < 2;
  element("step").append(new Option("all", -1), ...Array.from({ length: steps }, (_, step) => new Option(step, step)));
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  new ResizeObserver(redraw).observe(viewport);
  filter();
  setStep(-1);
  fitRows(0.6, 1.4);
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
    const t = timelines[number], lane = laneOf(t, span), box = viewport.getBoundingClientRect();
    const panel = layout.panels.find((each) => each.places.has(lane)), place = panel?.places.get(lane);
    const middle = ((Math.max(t.begin[span] - originOf(t), view.from) + Math.min(t.end[span] - originOf(t), view.to)) / 2 - view.from);
    return place && { x: box.left + panel.left + (middle * panel.width) / (view.to - view.from), y: box.top + place.y + place.height / 2 - viewport.scrollTop };
  },
};
document.documentElement.dataset.ready = "true";
