// Departures of uniform maps from their mean, as UNIFORM and ATTENTION in vitlens/plot/scales.py.

export const UNIFORM = { map: 0.1, attention: 0.3, similarity: 0, norms: 0 };
