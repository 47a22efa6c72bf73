// address.js: what is chosen stands in the address behind "#", so a copied address shows the same.

const FLAGS = ["path", "memory", "arrows"];

// Returns what differs from the view at the begin, as text.
function inAddress() {
  const parts = new URLSearchParams(), { from, to, chosen } = view, number = (value) => Number(value.toPrecision(7));
  const put = (name, value, plain) => value === plain || parts.set(name, value);
  if (view.step !== usualStep()) put("step", view.step < 0 ? "all" : view.step);
  if (!isWhole()) (put("from", number(from)), put("to", number(to)));
  put("layout", view.layout, usualLayout());
  if (!view.fitted) put("height", number(view.scale));
  put("hide", [...view.hidden].map((kind) => data.kinds[kind].kind).join(","), "");
  put("flags", FLAGS.filter((name) => view[name]).join(","), "path,memory");
  for (const id of ["ranks", "microbatches", "text"]) put(id, element(id).value.trim(), "");
  if (chosen) put("box", `${chosen.t.number}.${chosen.span}`);
  return parts.toString().replaceAll("%2C", ",");
}

// Shows what an address says; what makes no sense there is left out.
function fromAddress(text) {
  const parts = new URLSearchParams(text), number = (name) => (parts.get(name)?.trim() ? Number(parts.get(name)) : NaN);
  const step = parts.get("step") === "all" ? -1 : number("step");
  view.layout = [...element("layout").options].some((each) => each.value === parts.get("layout")) && timelines.length > 1
    ? parts.get("layout") : usualLayout();
  element("layout").value = view.layout;
  view.hidden = new Set((parts.get("hide") ?? "").split(",").filter((kind) => Object.hasOwn(kindNumber, kind)).map((kind) => kindNumber[kind]));
  for (const name of FLAGS) view[name] = (parts.get("flags") ?? "path,memory").split(",").includes(name);
  for (const id of ["ranks", "microbatches", "text"]) {
    element(id).value = parts.get(id) ?? "";
    element(id).dispatchEvent(new Event("input"));
  }
  legend();
  view.chosen = null;
  setStep(Number.isInteger(step) && step >= -1 && step < numSteps() ? step : usualStep());
  const height = number("height");
  if (height > 0) scaleRanks(height);
  else fitRanks(USUAL);
  if (number("from") < number("to")) show(number("from"), number("to"));
  const [which, span] = (parts.get("box") ?? "").split(".").map(Number), t = timelines[which];
  choose(t, t && Number.isInteger(span) && span < t.size ? span : -1);
}

// Writes the address once nothing has changed for a while: browsers refuse many writes at once.
let waiting = 0;
function writeAddress() {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    const text = inAddress();
    if (text !== location.hash.slice(1)) history.replaceState(null, "", `#${text}`);
  }, 150);
}
