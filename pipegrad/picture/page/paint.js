// paint.js: draws what is in view.
//
// Level of detail: a track shows boxes if they are wide enough to be seen on average. Otherwise it
// shows shares: bars of a few pixels, in which each kind has the part of the height that it has of
// the time. So a track never has more than its width in things to draw, whatever it holds.

const NARROWEST = 3; // pixels of an average box
const MOST_BARS = 60000; // in a frame; with more tracks in view, bars are wider
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const drawn = { boxes: 0, bars: 0, texts: 0, milliseconds: 0 };

class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.patterns = new Map();
  }

  // Draws a frame: `top` is how far the ranks are scrolled.
  frame(layout, view, top, width, height, ratio) {
    const started = performance.now();
    Object.assign(drawn, { boxes: 0, bars: 0, texts: 0 });
    if (this.ratio !== ratio) this.patterns.clear();
    Object.assign(this, { view, top, height, ratio, colours: themeColours(), texts: [] });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.context;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = this.colours.back;
    context.fillRect(0, 0, width, height);
    for (const panel of layout.panels) this.panel(panel);
    drawn.milliseconds = performance.now() - started;
  }

  panel(panel) {
    this.scale = panel.width / (this.view.to - this.view.from); // pixels of a second
    const groups = panel.groups.filter((g) => g.y + g.height > this.top && g.y < this.top + this.height);
    const tracks = groups.flatMap((g) => g.strips.flatMap((strip) => strip.tracks)).length;
    this.bar = Math.max(NARROWEST, Math.ceil((tracks * panel.width * 4) / MOST_BARS));
    this.boxesOf = data.kinds.map(() => [[], []]); // dimmed, and shown: left, top, width, height, ...
    this.clip(panel, () => {
      groups.forEach((group) => this.background(panel, group));
      this.grid(panel);
      for (const group of groups) {
        for (const strip of group.strips) {
          if (strip.what === "memory") this.memory(panel, group, strip);
          for (const track of strip.tracks) this.track(panel, group, track);
        }
      }
      this.fillBoxes();
      this.drawTexts();
      this.stepEnds(panel);
      if (this.view.path) for (const t of timelines) this.criticalPath(panel, t);
      if (this.view.arrows) this.arrows(panel, groups);
      this.marks(panel);
    });
    groups.forEach((group) => this.names(panel, group));
    this.axis(panel);
  }

  clip(panel, draw) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(panel.left, AXIS, panel.width, this.height - AXIS);
    this.context.clip();
    draw();
    this.context.restore();
  }

  x(panel, t, seconds) {
    return panel.left + (seconds - originOf(t) - this.view.from) * this.scale;
  }

  background(panel, group) {
    this.context.fillStyle = this.colours.band;
    for (const strip of group.strips) this.context.fillRect(panel.left, strip.y - this.top, panel.width, strip.height);
  }

  // Returns 1 for a span that is shown, 0 for a dimmed one. A chosen box dims other microbatches.
  light(t, span) {
    const { chosen } = this.view;
    if (t.mask[span] < 2) return 0;
    return !chosen || chosen.t.microbatch[chosen.span] < 0 || isOfSame(t, span, chosen.t, chosen.span) ? 1 : 0;
  }

  track(panel, group, track) {
    const { t } = group, origin = originOf(t) + this.view.from;
    const first = bisect(t.end, origin, track.first, track.end);
    const end = bisect(t.begin, origin + panel.width / this.scale, first, track.end);
    if ((end - first) * NARROWEST > panel.width) this.shares(panel, t, track, first, end);
    else this.boxes(panel, t, track, first, end);
  }

  boxes(panel, t, track, first, end) {
    const { y, height } = panel.spots.get(track), mask = t.mask;
    for (let span = first; span < end; span++) {
      if (!mask[span] || t.end[span] <= t.begin[span]) continue;
      const from = Math.max(this.x(panel, t, t.begin[span]), panel.left - 9);
      const to = Math.min(this.x(panel, t, t.end[span]), panel.left + panel.width + 9);
      const space = to - from > 5 ? 1 : 0; // between boxes
      const light = this.light(t, span);
      this.boxesOf[t.kind[span]][light].push(from, y - this.top, Math.max(to - from - space, 0.7), height);
      drawn.boxes++;
      if (to - from > 7 && height > 8 && light) this.texts.push([t, span, from, to - space, y, height]);
    }
  }

  shares(panel, t, track, first, end) {
    const { y, height } = panel.spots.get(track), size = data.kinds.length, mask = t.mask;
    const count = Math.ceil(panel.width / this.bar), perBar = this.scale / this.bar;
    const shares = new Float64Array(count * size * 2);
    const origin = originOf(t) + this.view.from;
    for (let span = first; span < end; span++) {
      if (!mask[span]) continue;
      const from = Math.max((t.begin[span] - origin) * perBar, 0), to = Math.min((t.end[span] - origin) * perBar, count);
      const at = t.kind[span] * 2 + this.light(t, span);
      for (let bar = Math.floor(from); bar < to; bar++) {
        shares[bar * size * 2 + at] += Math.min(to, bar + 1) - Math.max(from, bar);
      }
    }
    this.bars(panel, shares, count, y - this.top, height);
  }

  // Stacks the shares of each bar. Edges lie on whole pixels, so bars side by side that look alike
  // become one box.
  bars(panel, shares, count, top, height) {
    const slots = data.kinds.length * 2, last = new Int32Array(slots).fill(-1);
    for (let bar = 0; bar < count; bar++) {
      const left = panel.left + bar * this.bar;
      let filled = 0, lower = Math.round(top + height);
      for (let at = 0; at < slots; at++) {
        filled += shares[bar * slots + at];
        const upper = Math.round(top + height * (1 - Math.min(filled, 1))), tall = lower - upper;
        if (!tall) continue;
        lower = upper;
        const boxes = this.boxesOf[at >> 1][at & 1], before = last[at];
        const goesOn = before >= 0 && boxes[before] + boxes[before + 2] === left && boxes[before + 1] === upper;
        if (goesOn && boxes[before + 3] === tall) boxes[before + 2] += this.bar;
        else {
          last[at] = boxes.push(left, upper, this.bar, tall) - 4;
          drawn.bars++;
        }
      }
    }
  }

  // Fills the boxes of one kind after the other: changing colours takes longer than filling. One
  // path of all boxes would be far slower than so many rectangles.
  fillBoxes() {
    const context = this.context;
    data.kinds.forEach((kind, number) => {
      this.boxesOf[number].forEach((boxes, shown) => {
        context.globalAlpha = shown ? 1 : 0.2;
        fillLike(context, kind, boxes.length && this.pattern(number), this.colours.hatch, (style) => {
          context.fillStyle = style;
          for (let at = 0; at < boxes.length; at += 4) {
            context.fillRect(boxes[at], boxes[at + 1], boxes[at + 2], boxes[at + 3]);
          }
        });
      });
    });
    context.globalAlpha = 1;
  }

  // Returns the hatching of a wait.
  pattern(number) {
    const kind = data.kinds[number];
    if (!kind.is_hatched) return null;
    if (!this.patterns.has(number)) this.patterns.set(number, hatching(this.context, kind, this.ratio));
    return this.patterns.get(number);
  }

  drawTexts() {
    const context = this.context;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const [t, span, from, to, y, height] of this.texts) {
      const [lines, size] = fitting(textsOf(t, span), to - from - 2, isWait(t.kind[span]) ? Math.min(height, 12) : height);
      const kind = data.kinds[t.kind[span]], middle = y - this.top + height / 2 + 0.5;
      context.font = `${size}px ${FONT}`;
      context.fillStyle = kind.is_hatched ? this.colours.text : kind.text;
      lines.forEach((line, at) => {
        context.fillText(line, (from + to) / 2, middle + (at - (lines.length - 1) / 2) * size * 1.1);
      });
      if (!lines.length) continue;
      drawn.texts++;
    }
  }

  memory(panel, group, strip) {
    const { t, rank } = group, points = t.memory.ranks[rank];
    const most = Math.max(...timelines.map((each) => each.memory.most));
    const level = (bytes) => strip.y + strip.height * (1 - bytes / most) - this.top;
    const context = this.context, origin = originOf(t) + this.view.from;
    const right = Math.min(panel.left + panel.width, this.x(panel, t, t.last));
    let point = Math.max(bisect(points.seconds, origin, 0, points.seconds.length) - 1, 0);
    const bottom = strip.y + strip.height - this.top, line = new Path2D();
    let held = points.seconds[point] <= origin ? points.bytes[point] : 0;
    for (let x = panel.left; x < right; x += 1) {
      const until = origin + (x + 1 - panel.left) / this.scale;
      let highest = held; // of all points within a pixel, so that no peak is lost
      for (; point < points.seconds.length && points.seconds[point] < until; point++) {
        held = points.bytes[point];
        highest = Math.max(highest, held);
      }
      line.lineTo(x, level(highest));
      line.lineTo(x + 1, level(highest));
    }
    const area = new Path2D(line);
    area.lineTo(right, bottom);
    area.lineTo(panel.left, bottom);
    context.fillStyle = this.colours.memory;
    context.fill(area);
    context.strokeStyle = this.colours.level;
    context.lineWidth = 1;
    context.stroke(line);
  }

  grid(panel) {
    this.context.fillStyle = this.colours.line;
    for (const tick of ticks(this.view, panel.width)) {
      this.context.fillRect(panel.left + (tick - this.view.from) * this.scale, AXIS, 1, this.height);
    }
  }

  axis(panel) {
    const context = this.context;
    context.fillStyle = this.colours.back;
    context.fillRect(panel.left - panel.gutter, 0, panel.width + panel.gutter + MARGIN, AXIS);
    context.fillStyle = this.colours.soft;
    context.font = `11px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const right = panel.left + panel.width;
    for (const tick of ticks(this.view, panel.width)) {
      const x = panel.left + (tick - this.view.from) * this.scale;
      if (x < right - 20) context.fillText(tick ? duration(tick, 9) : "0", x, AXIS / 2 + 2);
      context.fillRect(x, AXIS - 5, 1, 5);
    }
    context.textAlign = "left";
    if (this.view.layout === "beside") {
      context.fillStyle = this.colours.text;
      context.fillText(shortened(context, panel.groups[0]?.t.title ?? "", panel.gutter - 16), panel.left - panel.gutter + MARGIN, AXIS / 2 + 2);
    }
    context.fillStyle = this.colours.line;
    context.fillRect(panel.left - panel.gutter, AXIS - 1, panel.width + panel.gutter + MARGIN, 1);
  }

  // Writes the name of a rank, its stages and its memory, as far as there is room.
  names(panel, group) {
    const context = this.context, left = panel.left - panel.gutter + MARGIN, { t, rank } = group;
    const write = (text, y, colour, font = `11px ${FONT}`) => {
      context.font = font;
      context.fillStyle = colour;
      context.fillText(shortened(context, text, panel.gutter - 16), left, y - this.top);
    };
    const strip = group.strips[0], middle = strip.y + strip.height / 2, pitch = Math.max(group.height + group.gap, 1);
    if (middle - this.top < AXIS || group.number % Math.ceil(11 / pitch)) return; // as many as there is room for
    context.textAlign = "left";
    context.textBaseline = "middle";
    const stages = t.stage_to_rank.flatMap((owner, stage) => (owner === rank ? [stage] : []));
    const second = timelines.length > 1 && this.view.layout !== "beside" ? shortTitle(t) : stageText(stages);
    const first = group.height < 30 && timelines.length > 1 ? `${rank} ${second}` : `rank ${rank}`;
    write(first, middle, this.colours.text, `600 ${Math.min(12, Math.max(10, strip.height))}px ${FONT}`);
    if (group.height >= 30) write(second, middle + 15, this.colours.soft);
    const memory = group.strips.find((each) => each.what === "memory");
    if (memory && memory.height >= 9 && memory.y > middle + 22) {
      write(`${bytesInWords(t.memory.ranks[rank].peak)} peak`, memory.y + memory.height / 2 + 2, this.colours.soft, `10px ${FONT}`);
    }
  }

  stepEnds(panel) {
    if (this.view.step >= 0 || timelines.every((t) => t.step_ends.length < 2)) return;
    for (const group of panel.groups) {
      this.context.fillStyle = this.colours.text;
      for (const end of group.t.step_ends) {
        this.context.fillRect(this.x(panel, group.t, end), group.y - this.top - 2, 1, group.height + 3);
      }
    }
  }

  // Underlines what is on the critical path, and connects each part with the next. Two paths in the
  // same lines would cover each other: there it only underlines.
  criticalPath(panel, t) {
    const context = this.context, lines = new Path2D(), bars = new Path2D();
    let before = null;
    for (const part of t.path) {
      const spot = panel.spots.get(part.track);
      if (!spot) continue;
      const from = this.x(panel, t, part.begin), to = this.x(panel, t, part.end);
      const y = spot.y + spot.height - this.top;
      bars.rect(from, y - 3, Math.max(to - from, 1), 3);
      if (before && before.y !== y) (lines.moveTo(before.x, before.y - 1.5), lines.lineTo(from, y - 1.5));
      before = { x: to, y };
    }
    context.fillStyle = context.strokeStyle = this.colours.strong;
    context.fill(bars);
    context.lineWidth = 1.2;
    if (timelines.length === 1 || this.view.layout !== "paired") context.stroke(lines);
  }

  // Draws from where a message leaves to the rank that receives it, for boxes that can be seen.
  arrows(panel, groups) {
    for (const { t, rank } of groups) {
      for (const track of t.tracks.filter((each) => each.rank === rank && each.beside)) {
        const origin = originOf(t) + this.view.from;
        const first = bisect(t.end, origin, track.first, track.end);
        const end = bisect(t.begin, origin + panel.width / this.scale, first, track.end);
        if ((end - first) * 12 > panel.width) continue;
        for (let span = first; span < end; span++) if (t.mask[span] === 2) this.arrow(panel, t, span, this.colours.soft);
      }
    }
  }

  arrow(panel, t, span, colour) {
    if (data.kinds[t.kind[span]].kind !== "transfer") return;
    const from = panel.spots.get(trackOf(t, span));
    const target = panel.groups.find((each) => each.t === t && each.rank === t.peer[span]);
    if (!from || !target) return;
    const strip = target.strips[0], down = strip.y > from.y;
    const y = (down ? strip.y : strip.y + strip.height) - this.top;
    this.context.strokeStyle = this.context.fillStyle = colour;
    this.pointer(this.x(panel, t, t.begin[span]), from.y + from.height / 2 - this.top, this.x(panel, t, t.end[span]), y);
  }

  // Draws the way of a microbatch through the ranks, from compute to compute; what the chosen one
  // needs, and what needs it, stands out.
  chain(panel, { t, span, chain }) {
    const context = this.context;
    for (let at = 1; at < chain.length; at++) {
      const pair = [chain[at - 1], chain[at]], [from, to] = pair.map((each) => panel.spots.get(trackOf(t, each)));
      if (!from || !to || from === to) continue;
      const down = to.y > from.y;
      context.strokeStyle = context.fillStyle = pair.includes(span) ? this.colours.text : this.colours.level;
      this.pointer(
        this.x(panel, t, t.end[pair[0]]), from.y + (down ? from.height : 0) - this.top,
        this.x(panel, t, t.begin[pair[1]]), to.y + (down ? 0 : to.height) - this.top,
      );
    }
  }

  // Draws an arrow.
  pointer(fromX, fromY, x, y) {
    const context = this.context, back = y > fromY ? -6 : 6;
    context.lineWidth = 1.2;
    context.beginPath();
    context.moveTo(fromX, fromY);
    context.lineTo(x, y);
    context.stroke();
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x - 3.5, y + back);
    context.lineTo(x + 3.5, y + back);
    context.fill();
  }

  // Frames the chosen box and the box under the pointer, and what they waited for.
  marks(panel) {
    if (this.view.chosen) this.chain(panel, this.view.chosen);
    for (const [marked, colour] of [[this.view.hovered, this.colours.soft], [this.view.chosen, this.colours.text]]) {
      if (!marked) continue;
      const { t, span } = marked, cause = isWait(t.kind[span]) ? besideOf(t, span) : -1;
      for (const each of [span, cause]) {
        if (each < 0) continue;
        this.arrow(panel, t, each, colour);
        const spot = panel.spots.get(trackOf(t, each));
        if (!spot) continue;
        const from = this.x(panel, t, t.begin[each]), to = this.x(panel, t, t.end[each]);
        this.context.strokeStyle = colour;
        this.context.lineWidth = 2;
        this.context.strokeRect(from, spot.y - this.top, Math.max(to - from - 1, 1), spot.height);
      }
    }
  }
}

// Returns the longest text that fits into a box, as lines, and its size in pixels.
function fitting(texts, width, height) {
  const sizes = height > 20 ? [height > 36 ? 14 : 12, 9.5] : [Math.min(10, height - 1)];
  for (const lines of texts.map((text) => text.split("\n"))) {
    const letters = Math.max(...lines.map((line) => line.length));
    const size = sizes.find((each) => (0.62 * letters + 0.2) * each <= width && lines.length * each * 1.1 <= height);
    if (letters && size) return [lines, size];
  }
  return [[], 0];
}

// Returns what may stand in a box, the longest first. A compute always has its kind: colour alone
// would not tell everybody.
function textsOf(t, span) {
  const kind = data.kinds[t.kind[span]].kind, label = t.labels[t.label[span]];
  if (isCompute(t.kind[span])) {
    const what = `${t.several ? t.stage[span] : ""}${kind}`, microbatch = t.microbatch[span];
    return [`${what}${microbatch}`, `${what}\n${microbatch}`, `${kind}${microbatch}`, `${kind}\n${microbatch}`, kind];
  }
  if (kind === "transfer") return [label, `→${t.peer[span]}`];
  if (isWait(t.kind[span])) return [label && `waits for ${label}`, label];
  return [label, data.kinds[t.kind[span]].name];
}

// Calls `fill` with each style that a kind is filled with.
function fillLike(context, kind, pattern, strength, fill) {
  if (!kind.is_hatched) return fill(kind.fill);
  const alpha = context.globalAlpha;
  context.globalAlpha = alpha * strength * 0.2;
  fill(kind.fill);
  context.globalAlpha = alpha * strength;
  return fill(pattern);
}

function hatching(context, kind, ratio) {
  const size = Math.round(6 * ratio), tile = new OffscreenCanvas(size, size), brush = tile.getContext("2d");
  brush.strokeStyle = kind.fill;
  brush.lineWidth = 0.9 * ratio;
  for (const shift of [-size, 0, size]) {
    brush.beginPath();
    brush.moveTo(shift - 1, kind.is_mirrored ? -1 : size + 1);
    brush.lineTo(shift + size + 1, kind.is_mirrored ? size + 1 : -1);
    brush.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["back", "text", "soft", "line", "band", "strong", "memory", "level", "hatch"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// Returns round moments, at least 90 pixels apart.
function ticks(view, width) {
  const least = ((view.to - view.from) * 90) / width, power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((n) => n * power).find((each) => each >= least);
  const hit = [];
  for (let n = Math.ceil(view.from / step); n * step <= view.to; n++) hit.push(n * step);
  return hit;
}

function shortTitle(t) {
  const others = timelines.filter((each) => each !== t);
  return others.every((each) => each.source !== t.source) ? t.source : t.name || t.title;
}

function stageText(stages) {
  return stages.length ? `stage${stages.length > 1 ? "s" : ""} ${stages.join(", ")}` : "";
}

function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let size = text.length;
  while (size > 1 && context.measureText(`${text.slice(0, size)}…`).width > width) size--;
  return `${text.slice(0, size)}…`;
}
