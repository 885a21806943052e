// Order of the results of a search, in place of Sphinx's, which has many ties and breaks them by the alphabet.
// A result gains by the words of the query in its own name or title, rare words more than common ones.
const searched = { query: null, words: [], weights: new Map() };
const stem = (word) => (word.length > 4 ? word.replace(/(ings?|es?|s)$/, "") : word);
const split = (text) => text.toLowerCase().match(/[\p{Letter}\p{Number}]+/gu) ?? [];

// Words of the query, and the weight of each: the logarithm of the share of headings without it.
const prepareScores = () => {
  const query = document.querySelector('#search-documentation [name="q"], input[name="q"]').value;
  const asked = new URLSearchParams(location.search).get("q") ?? query;
  if (searched.query === asked) return;
  searched.query = asked;
  searched.words = [...new Set(split(asked).map(stem))];
  const headings = Object.keys(Search._index.alltitles).map(split);
  for (const word of searched.words) {
    const having = headings.filter((heading) => contains(heading, word)).length;
    searched.weights.set(word, Math.log((headings.length + 1) / (having + 1)));
  }
};
const contains = (words, stem) => words.some((word) => word.startsWith(stem));

// Share of the query in a text, from 0 to 1, less for a text with many other words.
const share = (text) => {
  const words = split(text);
  let total = 0;
  let matched = 0;
  let common = 0;
  for (const word of searched.words) {
    const weight = searched.weights.get(word);
    total += weight;
    if (!contains(words, word)) continue;
    matched += weight;
    common += 1;
  }
  return total ? (matched / total) * (0.8 + 0.2 * Math.min(1, common / words.length)) : 0;
};

// The best share of a heading of a page.
const bestHeading = (page) => {
  let best = 0;
  for (const [title, places] of Object.entries(Search._index.alltitles))
    if (places.some(([file]) => Search._index.docnames[file] === page))
      best = Math.max(best, share(title));
  return best;
};

var Scorer = {
  score: ([page, title, , , score, , kind]) => {
    prepareScores();
    // of a name, the last part counts, and the parts before it a little
    const name = kind === "object" ? title.split(".").at(-1) : title;
    let gained = 20 * share(name);
    if (kind === "object") gained += 4 * share(title);
    else gained += 6 * bestHeading(page);
    if (/^(CHANGELOG|CONTRIBUTING|data\/|notebooks\/README)/.test(page)) gained -= 15;
    return score + gained;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
