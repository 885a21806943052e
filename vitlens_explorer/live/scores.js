// The score of a map in a live page: the curves of covering and of revealing its patches, against those of random
// orders. As `vitlens.faithfulness.curves` and `score` of vitlens_explorer/views.py.

import { sumOf } from "../front/values.js";
import { pairOf, targetWords } from "../in_page/maps.js";
import { formatLikePython, say, sharesOf } from "../in_page/numbers.js";

// Counts of patches after each step: 0, step, 2·step … and all of them.
function countsOf(patches, points) {
  const step = Math.ceil(patches / points);
  const counts = [];
  for (let count = 0; count < patches; count += step) counts.push(count);
  return [...counts, patches];
}

// Patches in the order in which a map is covered, highest value first. ties: the order of equal values.
function orderOf(values, ties) {
  return [...ties].sort((a, b) => values[b] - values[a]);
}

// Random orders of patches for grids that the file has none for. The generator is mulberry32, with a fixed seed.
function shuffle(patches, seed) {
  let state = seed;
  const random = () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
  const order = Array.from({ length: patches }, (_, patch) => patch);
  for (let last = patches - 1; last > 0; last -= 1) {
    const other = Math.floor(random() * (last + 1));
    [order[last], order[other]] = [order[other], order[last]];
  }
  return order;
}

// The order of ties and the random orders for a number of patches.
function ordersOf({ ties, random }, patches) {
  if (ties.length === patches) return { ties, random };
  const [first, ...others] = [...random, ties].map((_, seed) => shuffle(patches, seed));
  return { ties: first, random: others };
}

// Which patches are shown (P) when the first `count` of an order are covered, or are the only ones revealed.
function shownAfter(order, count, covers) {
  const shown = new Uint8Array(order.length).fill(covers ? 1 : 0);
  for (const patch of order.slice(0, count)) shown[patch] = covers ? 0 : 1;
  return shown;
}

// Area under a curve over the share of patches, by the trapezoidal rule.
function areaUnder(curve, shares) {
  const parts = curve.slice(1).map((value, k) => {
    return ((value + curve[k]) / 2) * (shares[k + 1] - shares[k]);
  });
  return sumOf(parts);
}

const averageOf = (values) => sumOf(values) / values.length;

function deviationOf(values) {
  const mean = averageOf(values);
  return Math.sqrt(sumOf(values.map((value) => (value - mean) ** 2)) / (values.length - 1));
}

// The probability of a class, that among two, a logit, or the cosine with the unit vector `like`, from a forward.
function measure({ logits, output }, outputs, { target, against, like }) {
  if (like) return sumOf(output.map((value, i) => value * like[i])) / Math.hypot(...output);
  if (outputs === "value" || (outputs === "independent" && against !== null)) {
    return logits[target] - (against === null ? 0 : logits[against]);
  }
  if (against !== null) return 1 / (1 + Math.exp(logits[against] - logits[target]));
  return sharesOf(logits, outputs)[target];
}

// The parts of a score that the front end draws. own, random: {deletion, insertion} curves.
function describeScore({ own, random, shares, scale, clear, baseline }) {
  const gainOf = ({ deletion, insertion }) =>
    areaUnder(insertion, shares) - areaUnder(deletion, shares);
  const gains = random.map(gainOf);
  const sigmas = (gainOf(own) - averageOf(gains)) / deviationOf(gains);
  let chance = "no better";
  if (sigmas >= clear) chance = "better";
  if (sigmas <= -clear) chance = "worse";
  let verdict = say("equal");
  if (Number.isFinite(sigmas)) {
    const size = formatLikePython(Math.abs(sigmas));
    verdict = say(sigmas >= 0 ? "above" : "below", { sigmas: size, orders: random.length });
  }
  const meanCurve = (kind) => shares.map((_, k) => averageOf(random.map((each) => each[kind][k])));
  return {
    verdict: say(chance),
    short: say("sigmas", { sigmas: formatLikePython(sigmas) }),
    scale,
    shares,
    curves: {
      deletion: own.deletion,
      insertion: own.insertion,
      "random deletion": meanCurve("deletion"),
      "random insertion": meanCurve("insertion"),
    },
    words: say("score", {
      baseline,
      deletion: formatLikePython(areaUnder(own.deletion, shares)),
      insertion: formatLikePython(areaUnder(own.insertion, shares)),
      verdict,
    }),
  };
}

const CANCELED = Symbol("canceled");

// The forwards of one score, with their progress.
class Scoring {
  isCanceled = false;
  done = 0;
  started = performance.now();

  // ask: of the worker. report: called with {what, done, of, left}, or null at the end.
  constructor(ask, report, what, total) {
    Object.assign(this, { ask, report, what, total });
  }

  async run(given, shown, of) {
    if (this.isCanceled) throw CANCELED;
    const forward = await this.ask("covered", { ...given, shown });
    if (this.isCanceled) throw CANCELED;
    this.done += 1;
    const spent = (performance.now() - this.started) / 1000;
    const left = (spent / this.done) * (this.total - this.done);
    this.report({ what: this.what, done: this.done, of: this.total, left });
    return measure(forward, given.outputs, of);
  }

  // {deletion, insertion} of an order. ends: scores of the whole and of the covered image.
  async curves(given, order, counts, ends, of) {
    const between = counts.slice(1, -1);
    const deletion = [ends.whole];
    const insertion = [ends.covered];
    for (const count of between) {
      deletion.push(await this.run(given, shownAfter(order, count, true), of));
    }
    for (const count of between) {
      insertion.push(await this.run(given, shownAfter(order, count, false), of));
    }
    return { deletion: [...deletion, ends.covered], insertion: [...insertion, ends.whole] };
  }
}

// What a score measures.
function scaleOfScore(scales, { outputs }, target, against) {
  if (Array.isArray(target)) return say("similarity unit");
  return against === null ? scales[outputs].alone : scales[outputs].against;
}

// Number of forwards of a score with `orders` orders besides the ends.
const forwardsOf = (counts, orders) => 2 + 2 * (counts.length - 2) * orders;

// Calls compute(run) with a new Scoring in place of the one that is going on, and draws when it is done or canceled.
// what, total: title and number of the forwards. restore: called if it does not end.
async function runForwards(live, source, what, total, compute, restore = () => {}) {
  const report = (progress) => source.emit("msg:custom", { progress }, []);
  const run = new Scoring(live.ask, report, what, total);
  let problem = null;
  live.cancel();
  live.running = run;
  try {
    await compute(run);
  } catch (error) {
    restore();
    if (error !== CANCELED) problem = error.message;
  } finally {
    if (live.running === run) live.running = null;
    report(null);
  }
  source.drawLater(problem);
}

// Scores the map of a source's state, and draws when it is done or canceled. The caller draws that it runs.
export async function scoreMap(live, source) {
  const { record, state, choice } = source;
  const { target, against } = choice;
  const { scoring } = live.stored;
  const { rows, cols } = record.grid;
  const key = pairOf(target, against);
  const map = record.maps[state.view]?.[key];
  if (!map?.score.starts) return; // it is scored, or being scored
  const counts = countsOf(rows * cols, scoring.points);
  const orders = ordersOf(scoring, rows * cols);
  const given = { ...record.given, outputs: record.outputs };
  record.random ||= {};
  const missing = record.random[key] ? 1 : 1 + orders.random.length;
  const title = source.view.entry.split(" (")[0];
  const fill = live.meanColor(state.photograph);
  const before = map.score;
  const restore = () => {
    map.score = before;
  };
  const compute = async (run) => {
    map.score = { title: say("trust"), words: say("scoring") };
    const patches = rows * cols;
    const all = new Uint8Array(patches).fill(1);
    const of = { target, against, like: map.like };
    const whole = await run.run(given, all, of);
    const covered = await run.run(given, new Uint8Array(patches), of);
    const ends = { whole, covered };
    const curvesOf = (order) => run.curves(given, order, counts, ends, of);
    const order = orderOf(map.values, orders.ties);
    const own = await curvesOf(order);
    if (!record.random[key]) {
      const random = [];
      for (const each of orders.random) random.push(await curvesOf(each));
      record.random[key] = random;
    }
    const other = against === null ? "" : say("rather than", { target: record.label(against) });
    const parts = describeScore({
      own,
      random: record.random[key],
      shares: counts.map((count) => count / patches),
      scale: scaleOfScore(scoring.scales, record, target, against),
      clear: scoring.clear,
      baseline: scoring.baseline,
    });
    const name = (map.like ? targetWords(record, target) : record.label(target)) + other;
    map.score = { title: say("trust"), name, order, fill, ...parts };
  };
  const total = forwardsOf(counts, missing);
  await runForwards(live, source, `Score of ${title}`, total, compute, restore);
}

// Measures how the probability of the likeliest class changes when each head is off alone, besides those that are off,
// and draws when it is done or canceled. record.effects: {way, name: of the class, values: (L, H)}.
export async function measureEffects(live, source) {
  const { record, state } = source;
  const { way } = state;
  const [target] = record.likeliest;
  if (target === undefined || record.effects?.way === way) return;
  const { layers } = live.stored.network;
  const compute = async (run) => {
    if (way === "mean") await live.prepareMeans(live.photos.get(state.photograph));
    const given = { ...record.given, mean: way === "mean", outputs: record.outputs };
    const { rows, cols } = record.grid;
    const all = new Uint8Array(rows * cols).fill(1);
    const shareWithout = (off) => run.run({ ...given, off }, all, { target, against: null });
    const before = await shareWithout(state.off);
    const values = [];
    for (let layer = 0; layer < layers; layer += 1) {
      values.push([]);
      for (let head = 0; head < record.heads; head += 1) {
        const after = await shareWithout([...state.off, [layer, head]]);
        values[layer].push(after - before);
      }
    }
    record.effects = { way, name: record.label(target), values };
  };
  await runForwards(live, source, say("effects"), 1 + layers * record.heads, compute);
}
