/* How the search orders what it finds: Sphinx puts this in front of its searchtools.js.

   Sphinx counts whether a word stands in a heading or in the text, and nothing else. So the list of
   all changes, which has every word, stood first. Here the kind of a page and its title count, too. */
"use strict";

const PREFERENCES = [
  [/^docs\/(how_to|tutorials)\//, 12],
  [/^docs\/coming_from\//, 6],
  [/^docs\/(index|files|numbers|internals)$/, -4], // they name everything
  [/^docs\/reference\//, 0],
  [/^docs\//, 10],
  [/^benchmarks\//, -10],
  [/^C/, -15], // CHANGELOG, CONTRIBUTING
];

var Scorer = {
  score: ([page, title, , , score, , kind]) => {
    // Who types a public name wants its signature: objNameMatch is above a text in a guide.
    if (kind === "object") return score;
    const query = new URLSearchParams(location.search).get("q").trim().toLowerCase();
    const preference = PREFERENCES.find(([name]) => name.test(page))?.[1] ?? 0;
    return score + preference + (title.toLowerCase().includes(query) ? 6 : 0);
  },

  objNameMatch: 15,
  objPartialMatch: 1,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
