// The page: fetches the data of the runs and fills its sections.
"use strict";

(async () => {
  const { h, byId, isNumber } = Watch;
  const source = Watch.openSource();
  Watch.source = source;

  const state = { runs: [], shown: 0, overviews: [], axis: "version", metric: "" };
  const AXES = {
    version: { label: "step", format: (value) => Watch.count(value), isTime: false },
    time_s: { label: "time", format: (value, step) => Watch.clock(value, step || 1), isTime: true },
    num_samples: { label: "completions", format: (value) => Watch.number(value), isTime: false },
  };

  // Each chart: its section, its metrics and its format. `lines` are metrics of steps.
  const CHARTS = [
    { at: "learning", title: "Reward", hint: "mean of each step", smooth: true, min: 0,
      lines: [["reward", "reward"]], empty: "No step has a reward yet" },
    { at: "learning", title: "Length of completions", hint: "sampled tokens, mean", min: 0,
      lines: [["completion_length", "length"]] },
    { at: "learning", title: "Gradient norm", hint: "before clipping, log scale", isLog: true, lines: [["gradient_norm", "gradient norm"]] },
    { at: "learning", title: "Loss and entropy", hint: "where the loss reports them",
      lines: [["loss", "loss"], ["entropy", "entropy"], ["value_loss", "value loss"], ["reference_kl", "KL to reference"]],
      isRare: true },
    { at: "staleness", title: "Lag of trained tokens", hint: "versions behind the trainer", min: 0,
      lines: [["lag_mean", "mean"], ["lag_max", "largest"]] },
    { at: "staleness", title: "Effective sample size", hint: "share of tokens or sequences; 1: all ratios are equal", min: 0.9, max: 1, format: Watch.number,
      compared: ["effective_sample_size", "effective_sample_size_sequences"], lines: [["effective_sample_size", "tokens"], ["effective_sample_size_used", "after the correction"],
        ["effective_sample_size_sequences", "sequences"]] },
    { at: "staleness", title: "Mismatch and staleness", hint: "KL(behaviour ‖ trainer), k3, nats per token, log scale", isLog: true,
      lines: [["behaviour_kl_k3", "all tokens"], ["mismatch_k3", "lag 0: numerics"], ["stale_k3", "lag > 0: staleness"]],
      empty: "Not measured yet" },
    { at: "staleness", title: "Little's law", hint: "age of groups in steps: from their versions, and from counts", min: 0, isRare: true,
      lines: [["littles_law.age", "by versions"], ["littles_law.expected_age", "by counts"]] },
    { at: "staleness", title: "Masked tokens", hint: "in each step", min: 0, isRare: true,
      lines: [["num_stale_tokens", "older than the lag limit"]] },
    { at: "speed", title: "Trained and sampled tokens", hint: "per second, mean since the run began", min: 0,
      lines: [["trained_tokens_per_s", "trained"], ["completion_tokens_per_s", "sampled"]] },
    { at: "speed", title: "Slot usage of the servers", hint: "since the previous step", min: 0, max: 1, format: Watch.percent,
      compared: ["utilisation"], lines: [["utilisation", "busy"], ["bubble_share", "bubbles"], ["paused_share", "paused (since the run began)"]] },
    { at: "speed", title: "Parts of a publish", hint: "seconds, log scale; gather and wire overlap", isLog: true, format: Watch.seconds, compared: ["publish.total_s", "publish.pause_s"],
      lines: [["publish.gather_s", "gather"], ["publish.wire_s", "wire"], ["publish.pause_s", "pause"], ["publish.load_s", "load"],
        ["publish.first_token_s", "first token"], ["publish.total_s", "total"]], empty: "No version has been published yet" },
    { at: "speed", title: "Groups", hint: "at the time of each step", min: 0,
      lines: [["groups_running", "being sampled"], ["groups_waiting", "waiting for a step"]] },
  ];
  const NEEDED = [...new Set(["time_s", "num_samples", "num_step_tokens", ...CHARTS.flatMap((chart) => chart.lines.map(([name]) => name))])];

  for (const chart of CHARTS) {
    chart.view = Watch.lineChart(chart);
    byId(chart.at).querySelector(".grid").append(chart.view.element);
  }
  const lags = Watch.histogram({ title: "Lag of tokens", hint: "whole run", xLabel: "versions behind", unit: "tokens", empty: "No tokens have been trained on yet" });
  const ages = Watch.histogram({ title: "Age of completions", hint: "lag of the first token, whole run", xLabel: "versions behind", unit: "completions", empty: "No completions have been trained on yet" });
  byId("staleness").querySelector(".grid").append(lags.element, ages.element);
  const rate = Watch.lineChart({ title: "Tokens per second by server", hint: "sampled", min: 0, empty: "No request has ended yet" });
  const busy = Watch.lineChart({ title: "Requests at each server", hint: "mean number of concurrent requests", min: 0, empty: "No request has ended yet" });
  const trainers = Watch.lineChart({ title: "Usage of the trainer ranks", hint: "share of time spent training; the rest is waiting or publishing", min: 0, max: 1, format: Watch.percent, empty: "No step has been taken yet" });
  byId("speed").querySelector(".grid").append(rate.element, busy.element, trainers.element);

  // ------------------------------------------------------------------------------------------------------------ data

  function xsOf(overview) {
    const steps = overview.steps;
    if (state.axis === "version") {
      const half = (steps.width - 1) / 2;
      return steps.versions.map((version) => Math.min(steps.last, version + half));
    }
    const found = steps.series[state.axis];
    return found ? found.mean : steps.versions.map(() => null);
  }

  function smoothed(values, window) {
    const kept = [];
    return values.map((value) => {
      if (isNumber(value)) kept.push(value);
      if (kept.length > window) kept.shift();
      return !kept.length ? null : kept.reduce((sum, it) => sum + it, 0) / kept.length;
    });
  }

  function seriesOf(chart) {
    const several = state.overviews.length > 1;
    const series = [], badAt = [];
    state.overviews.forEach((overview, run) => {
      const x = xsOf(overview);
      const lines = several && chart.compared ? chart.lines.filter(([name]) => chart.compared.includes(name)) : chart.lines;
      lines.forEach(([name, label], i) => {
        const values = overview.steps.series[name];
        if (!values || !values.mean.some(isNumber)) {
          if (values === undefined || !(name in overview.steps.not_finite)) return;
        }
        const colour = several ? run % 8 : i % 8;
        const dash = several ? (lines.length > 1 ? i : run) : i;
        const text = several ? (lines.length > 1 ? `${state.runs[run].name} · ${label}` : state.runs[run].name) : label;
        if (chart.smooth && values.mean.length > 10) {
          series.push({ label: text, x, mean: values.mean, colour, dash: 0, faint: true });
          series.push({ label: `${text}, mean of ten`, x, mean: smoothed(values.mean, 10), low: values.low, high: values.high, colour, dash });
        } else series.push({ label: text, x, ...values, colour, dash });
        if (name in overview.steps.not_finite) {
          const version = overview.steps.not_finite[name];
          const at = overview.steps.versions.findIndex((it, k, all) => k + 1 === all.length || all[k + 1] > version);
          badAt.push({ x: x[at], label: "not finite" });
        }
      });
    });
    const axis = AXES[state.axis];
    return { series, badAt: badAt.filter((it) => isNumber(it.x)), xLabel: axis.label, xFormat: axis.format, isTime: axis.isTime, isWhole: state.axis === "version" };
  }

  // Merges time bins until there are few enough to read.
  function overTime(rates, width, most, names) {
    const entries = Object.entries(rates);
    const join = Math.max(1, Math.ceil((entries[0] ? entries[0][1].length : 0) / most));
    const series = entries.map(([name, values], i) => {
      const x = [], mean = [];
      for (let k = 0; k < values.length; k += join) {
        const part = values.slice(k, k + join);
        x.push((k + part.length / 2) * width);
        mean.push(part.reduce((sum, it) => sum + it, 0) / part.length);
      }
      return { label: names(name), x, mean, colour: i % 8, dash: Math.floor(i / 8) + (i % 8) };
    });
    // The mean starts at the first value, because nothing ran before it.
    const meanOf = (it) => {
      const since = it.mean.slice(Math.max(0, it.mean.findIndex((value) => value > 0)));
      return since.length ? since.reduce((sum, value) => sum + value, 0) / since.length : null;
    };
    return { series: series.slice(0, 16), xLabel: "time", xFormat: AXES.time_s.format, isTime: true, meanOf };
  }

  // ------------------------------------------------------------------------------------------------------------ parts

  const SILENT_S = 60;

  function showStatus(overview) {
    const words = { running: "● running", finished: "✓ finished", interrupted: "◼ interrupted", failed: "✕ failed", unreadable: "✕ unreadable", empty: "○ no events yet" };
    const element = byId("status");
    element.className = `status ${overview.status}`;
    element.textContent = overview.is_read ? words[overview.status] || overview.status : "… reading events";
    const silentSeconds = Date.now() / 1000 - (overview.began_at + overview.end_s);
    if (overview.is_read && overview.status === "running" && silentSeconds > SILENT_S) {
      element.className = "status interrupted";
      const days = Math.floor(silentSeconds / 86400);
      element.textContent = `◌ no event for ${days < 2 ? Watch.clock(silentSeconds, 1) : `${Watch.count(days)} days`}`;
      element.title = "The run is waiting for something, or was killed.";
    } else element.removeAttribute("title");
    if (overview.unreadable) complain(overview.unreadable);
    byId("run-name").textContent = state.runs[state.shown].name;
    document.title = `${state.runs[state.shown].name} · inflight`;
  }

  function showFacts(overview) {
    const series = overview.steps.series;
    const last = (name) => { const values = series[name] ? series[name].mean.filter(isNumber) : []; return values.length ? values[values.length - 1] : null; };
    const share = overview.ledger && overview.ledger.trained !== undefined ? overview.ledger : null;
    const dropped = share ? Object.values(share.dropped || {}).reduce((sum, it) => sum + it, 0) : null;
    const healthy = overview.servers.filter((server) => server.state === "healthy").length;
    const known = overview.servers.filter((server) => server.state !== "left").length;
    const failures = Object.values(overview.num_failures).reduce((sum, it) => sum + it, 0);
    const isShort = overview.end_s < 120;
    const facts = [
      ["Step", Watch.count(overview.version), overview.num_steps ? `of ${Watch.count(overview.num_steps)}` : ""],
      ["Time", isShort ? Watch.seconds(overview.end_s) : Watch.clock(overview.end_s, 1), isShort ? "" : overview.end_s < 3600 ? "min:s" : "h:min:s"],
      ["Reward", Watch.number(last("reward")), "last step"],
      ["Sampled", Watch.number(last("completion_tokens_per_s")), "tokens/s"],
      ["Trained", Watch.number(last("trained_tokens_per_s")), "tokens/s"],
      ["Mean lag", Watch.number(last("lag_mean")), isNumber(last("lag_max")) ? `largest ${Watch.number(last("lag_max"))}` : "versions"],
      ["Sample size", Watch.percent(last("effective_sample_size")), "effective"],
      ["Servers", known ? `${healthy}/${known}` : "–", "healthy"],
      ["Trained groups", share ? Watch.count(share.trained) : "–", share ? `${Watch.count(dropped)} dropped` : ""],
      ["Failures", Watch.count(failures), ""],
    ];
    byId("facts").replaceChildren(...facts.map(([name, value, unit]) =>
      h("dl", { class: "fact" }, h("dt", {}, name), h("dd", {}, value, " ", h("small", {}, unit)))));
  }

  function showCharts() {
    const overview = state.overviews[state.shown];
    for (const chart of CHARTS) {
      const data = seriesOf(chart);
      chart.view.element.hidden = Boolean(chart.isRare) && !data.series.some((it) => it.mean.some((value) => value));
      chart.view.update(data);
    }
    const several = state.overviews.length > 1;
    const counts = (key) => state.overviews.map((it, run) => ({ label: several ? state.runs[run].name : "whole run", counts: it[key], colour: several ? run % 8 : 0 }));
    lags.update(counts("lags"));
    ages.update(counts("ages"));
    const rates = overview.rates;
    rate.update(overTime(rates.tokens, rates.width_s, 120, Watch.shortServer));
    busy.update(overTime(rates.busy, rates.busy_width_s, 120, Watch.shortServer));
    trainers.update(overTime(rates.training, rates.training_width_s, 60, (name) => name));
  }

  function showAll() {
    const overview = state.overviews[state.shown];
    if (!overview) return;
    showStatus(overview);
    showFacts(overview);
    showCharts();
    Watch.fleet.update(overview);
    Watch.timeline.update(state.shown, overview);
    Watch.rollouts.update(state.shown, overview);
    Watch.metrics.update(state.overviews, state.runs, xsOf, AXES[state.axis], state.axis);
    const began = overview.began_at ? new Date(overview.began_at * 1000).toLocaleString() : "";
    byId("footer").textContent = `${overview.directory}${began ? ` · began ${began}` : ""}${overview.inflight ? ` · inflight ${overview.inflight}` : ""}`;
  }

  // ------------------------------------------------------------------------------------------------------------ life

  function complain(what) {
    const notice = byId("notice");
    notice.textContent = what;
    notice.hidden = !what;
  }

  async function load(numbers) {
    const names = [...NEEDED, ...(Watch.metrics.wanted ? Watch.metrics.wanted() : [])];
    await Promise.all(numbers.map(async (run) => { state.overviews[run] = await source.overview(run, names); }));
    showAll();
  }
  Watch.reload = () => load(state.runs.map((_, run) => run)).catch((error) => complain(error.message));

  let pending = new Set(), isBusy = false;
  async function changed(numbers) {
    numbers.forEach((it) => pending.add(it));
    if (isBusy || document.hidden) return;
    isBusy = true;
    try {
      while (pending.size) {
        const now = [...pending];
        pending = new Set();
        const began = performance.now();
        await load(now);
        const isWhole = now.every((run) => state.overviews[run].is_read);
        // A run with many steps takes longer to draw, so draw less often to keep the page responsive.
        await new Promise((resolve) => setTimeout(resolve, Math.max(isWhole ? 700 : 100, 3 * (performance.now() - began))));
      }
    } catch (error) { complain(error.message); }
    isBusy = false;
  }

  document.addEventListener("visibilitychange", () => changed([]));
  byId("theme").addEventListener("click", () => Watch.theme.toggle());
  Watch.theme.listen(() => { if (Watch.timeline) Watch.timeline.draw(); });
  byId("axis-select").addEventListener("change", (event) => { state.axis = event.target.value; showAll(); });
  setInterval(() => { if (state.overviews[state.shown]) showStatus(state.overviews[state.shown]); }, 10000); // the status also changes when no events arrive
  byId("run-select").addEventListener("change", (event) => { state.shown = Number(event.target.value); showAll(); });

  try {
    state.runs = await source.runs();
    if (state.runs.length > 1) {
      byId("run-choice").hidden = false;
      byId("run-select").replaceChildren(...state.runs.map((run, i) => h("option", { value: i }, run.name)));
    }
    await load(state.runs.map((_, run) => run));
    document.documentElement.dataset.ready = "yes";
    source.follow(changed, (isThere) => complain(isThere ? "" : "The server of this page has ended or cannot be reached. The page keeps its data and resumes when the server is back."));
  } catch (error) { complain(error.message); }
})();
