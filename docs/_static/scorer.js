/* How the search orders what it finds: Sphinx puts this in front of its searchtools.js.

   Sphinx counts where a word stands, a heading or the text, and nothing else. So a list of all
   changes has every word, and stood first. Here the kind of a page counts, too. */
"use strict";

const PREFERENCES = [
  [/^docs\/(how_to|tutorials)\//, 12],
  [/^docs\/coming_from\//, 6],
  [/^docs\/(index|files|numbers|internals)$/, -4], // they name everything
  [/^docs\/reference\//, 0],
  [/^docs\//, 10],
  [/^examples\//, 0],
  [/^benchmarks\//, -10],
  [/^C/, -15], // CHANGELOG, CONTRIBUTING
];

var Scorer = {
  score: ([page, , , , score, , kind]) =>
    // A name of the reference is found by itself: whoever types one wants its signature.
    kind === "object" ? score : score + (PREFERENCES.find(([name]) => name.test(page))?.[1] ?? 0),

  objNameMatch: 11,
  objPartialMatch: 1,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
