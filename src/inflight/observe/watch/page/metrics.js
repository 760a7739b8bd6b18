// All metrics of steps as small charts, filtered by the search text.
"use strict";

(() => {
  const { h, byId, isNumber } = Watch;
  const MOST = 12;
  const input = h("input", { type: "search", placeholder: "for example kl, gradient, publish", "aria-label": "Names of metrics to show" });
  const grid = h("div", { class: "grid small" });
  const summary = h("span", { class: "soft" });
  byId("metrics-body").append(h("div", { class: "tools" }, h("label", {}, "Search ", input), summary), grid);
  const views = new Map();
  let names = [], known = [];

  const chosen = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    return words.length ? known.filter((name) => words.some((word) => name.toLowerCase().includes(word))).slice(0, MOST) : [];
  };

  input.addEventListener("input", () => { names = chosen(); Watch.reload(); });

  Watch.metrics = {
    wanted: () => names,
    update(overviews, runs, xsOf, axis, axisName) {
      known = [...new Set(overviews.flatMap((overview) => overview.steps.names))].sort();
      const all = known.filter((name) => chosen().includes(name));
      summary.textContent = input.value ? `${all.length === MOST ? `the first ${MOST}` : all.length} shown` : `${known.length} metrics`;
      const charts = all.map((name) => {
        if (!views.has(name)) views.set(name, Watch.lineChart({ title: name }));
        const series = overviews.flatMap((overview, run) => {
          const values = overview.steps.series[name];
          return values && values.mean.some(isNumber) ? [{ label: overviews.length > 1 ? runs[run].name : "value", x: xsOf(overview), ...values, colour: run % 8, dash: run }] : [];
        });
        const chart = views.get(name);
        return [chart, { series, xLabel: axis.label, xFormat: axis.format, isTime: axis.isTime, isWhole: axisName === "version" }];
      });
      grid.replaceChildren(...charts.map(([chart]) => chart.element));
      charts.forEach(([chart, data]) => chart.update(data));
    },
  };
})();
