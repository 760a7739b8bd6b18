// Line charts and histograms as SVG. A chart is a figure with update(data); it redraws when its width changes.
"use strict";

(() => {
  const { h, s, isNumber } = Watch;
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "1 2"];
  const DECADES = 8;  // smaller values are drawn at the bottom of a log scale
  const HEIGHT = 190, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 30;

  Watch.dash = (i) => DASHES[i % DASHES.length];

  const sizes = new ResizeObserver((entries) => entries.forEach((entry) => entry.target.redraw && entry.target.redraw()));

  function figure(title, hint) {
    const caption = h("figcaption", {}, h("h3", {}, title), h("span", { class: "hint" }, hint || ""));
    const plot = h("div", { class: "plot" });
    const legend = h("ul", { class: "legend" });
    const element = h("figure", { class: "card chart", tabindex: 0, role: "group", "aria-label": title }, caption, plot, legend);
    sizes.observe(element);
    return { element, plot, legend };
  }

  // 0.001 as 10⁻³.
  function power(value) {
    const digits = String(Math.round(Math.log10(value))).replace(/[-\d]/g, (sign) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(sign)]);
    return `10${digits}`;
  }

  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      if (!isNumber(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return low <= high ? [low, high] : null;
  }

  // Returns the mapping from values to pixels, and the marks of an axis.
  function axis(low, high, from, to, isLog, count, isTime) {
    if (isLog) {
      const top = Math.ceil(Math.log10(high)), bottom = Math.min(top - 1, Math.max(top - DECADES, Math.floor(Math.log10(low))));
      const marks = [];
      const every = Math.max(1, Math.ceil((top - bottom) / count));
      for (let power = bottom; power <= top; power += every) marks.push(10 ** power);
      const scale = (to - from) / (top - bottom);
      return { at: (value) => from + Math.max(0, Math.log10(value) - bottom) * scale, marks, step: 0 };
    }
    const step = Watch.niceStep(high - low, count, isTime);
    const marks = [];
    for (let mark = Math.ceil(low / step - 1e-9) * step; mark <= high + step * 1e-6; mark += step) marks.push(mark);
    return { at: (value) => from + ((value - low) / (high - low || 1)) * (to - from), marks, step };
  }

  function frame(svg, x, y, width, xFormat, yFormat, xLabel) {
    const bottom = HEIGHT - BOTTOM;
    for (const mark of y.marks) {
      const at = y.at(mark);
      if (at < TOP - 1 || at > bottom + 1) continue;
      svg.append(s("line", { class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      svg.append(s("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, yFormat(mark)));
    }
    for (const mark of x.marks) {
      const at = x.at(mark);
      svg.append(s("line", { class: "axis-line", x1: at, x2: at, y1: bottom, y2: bottom + 4 }));
      const anchor = at > width - 26 ? "end" : at < LEFT + 12 ? "start" : "middle";
      svg.append(s("text", { x: at, y: bottom + 16, "text-anchor": anchor }, xFormat(mark, x.step)));
    }
    svg.append(s("line", { class: "axis-line", x1: LEFT, x2: width - RIGHT, y1: bottom, y2: bottom }));
    svg.append(s("text", { x: width - RIGHT, y: HEIGHT - 2, "text-anchor": "end" }, xLabel));
  }

  function paths(xs, values, at, x) {
    let path = "", dots = [], before = false;
    for (let i = 0; i < values.length; i++) {
      const ok = isNumber(values[i]) && isNumber(xs[i]) && isNumber(at(values[i]));
      if (ok) {
        const point = `${x(xs[i]).toFixed(1)},${at(values[i]).toFixed(1)}`;
        const next = i + 1 < values.length && isNumber(values[i + 1]);
        if (!before && !next) dots.push([x(xs[i]), at(values[i])]);
        else path += `${before ? "L" : "M"}${point}`;
      }
      before = ok;
    }
    return { path, dots };
  }

  function bandPath(series, at, x, floor) {
    const up = [], down = [];
    for (let i = 0; i < series.x.length; i++) {
      if (!isNumber(series.low[i]) || !isNumber(series.high[i]) || !isNumber(series.x[i])) continue;
      up.push(`${x(series.x[i]).toFixed(1)},${at(Math.max(floor, series.high[i])).toFixed(1)}`);
      down.push(`${x(series.x[i]).toFixed(1)},${at(Math.max(floor, series.low[i])).toFixed(1)}`);
    }
    return up.length > 1 ? `M${up.join("L")}L${down.reverse().join("L")}Z` : "";
  }

  // options: title, hint, format, isLog, min, max (of the axis), empty (the text when there are no values)
  // data: {series: [{label, x, mean, low, high, colour, dash, faint}], xLabel, xFormat, isTime, badAt: [{x, label}]}
  Watch.lineChart = (options) => {
    const { element, plot, legend } = figure(options.title, options.hint);
    let data = null, chosen = null, layout = null;
    const format = options.format || Watch.number;

    function draw() {
      if (!data) return;
      const width = Math.max(220, plot.clientWidth || 400);
      const series = data.series.map((it) => (options.isLog ? { ...it, mean: it.mean.map((v) => (v > 0 ? v : null)) } : it));
      const ys = extent(series.flatMap((it) => [...it.mean, ...(options.isLog ? [] : [...(it.low || []), ...(it.high || [])])]));
      const xs = extent(series.flatMap((it) => it.x));
      layout = null;
      if (!ys || !xs) {
        const none = h("div", { class: "none" }, options.empty || "No values yet");
        none.style.height = `${HEIGHT}px`;
        plot.replaceChildren(none);
        legend.replaceChildren();
        element.setAttribute("aria-label", `${options.title}: no values`);
        return;
      }
      let [low, high] = ys;
      if (!options.isLog) {
        if (options.min !== undefined) low = Math.min(low, options.min);
        if (options.max !== undefined) high = Math.max(high, options.max);
        if (low === high && low === 0 && options.min === 0) high = 1;
        else if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
        else {
          const room = (high - low) * 0.06;
          if (low !== options.min) low -= room;
          high += room;
        }
      }
      let [first, last] = xs;
      if (first === last) { first -= 0.5; last += 0.5; }
      const x = axis(first, last, LEFT, width - RIGHT, false, width / 90, data.isTime);
      if (!data.isTime && data.isWhole) x.marks = x.marks.filter((mark) => Number.isInteger(mark));
      const y = axis(low, high, HEIGHT - BOTTOM, TOP, options.isLog, 5);
      const svg = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, "aria-hidden": "true" });
      frame(svg, x, y, width, data.xFormat, options.isLog && !options.format ? power : format, data.xLabel);
      for (const it of series) {
        if (it.low && it.high && !it.faint) {
          const band = bandPath(it, y.at, x.at, options.isLog ? 10 ** Math.floor(Math.log10(low)) : -Infinity);
          if (band) svg.append(s("path", { d: band, class: `band c${it.colour}` }));
        }
      }
      for (const it of series) {
        const { path, dots } = paths(it.x, it.mean, y.at, x.at);
        const line = s("path", { d: path, class: `line c${it.colour}`, "stroke-dasharray": Watch.dash(it.dash || 0) });
        if (it.faint) line.setAttribute("opacity", "0.35");
        svg.append(line);
        for (const [cx, cy] of dots) svg.append(s("circle", { cx, cy, r: it.faint ? 1.5 : 2.5, class: `c${it.colour}` }));
      }
      for (const bad of data.badAt || []) {
        const at = x.at(bad.x);
        svg.append(s("line", { class: "bad-mark", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM, "stroke-dasharray": "4 3" }));
        svg.append(s("text", { class: "bad-mark", x: Math.min(at + 4, width - 90), y: TOP + 10 }, bad.label));
      }
      layout = { svg, x, y, series, width, cross: null };
      plot.replaceChildren(svg);
      tell();
    }

    function tell() {
      if (!layout) return;
      if (layout.cross) layout.cross.remove();
      const entries = [];
      const longest = layout.series.reduce((a, b) => (b.x.length > a.x.length ? b : a), layout.series[0]);
      const at = chosen === null ? null : longest.x[Math.min(chosen, longest.x.length - 1)];
      if (at !== null && isNumber(at)) {
        const px = layout.x.at(at);
        layout.cross = s("line", { class: "cross", x1: px, x2: px, y1: TOP, y2: HEIGHT - BOTTOM });
        layout.svg.append(layout.cross);
        entries.push(h("li", {}, h("b", {}, `${data.xLabel} ${data.xFormat(at, layout.x.step / 10)}`)));
      }
      for (const it of layout.series) {
        if (it.faint) continue;
        const i = at === null ? lastNumber(it.mean) : nearest(it.x, at);
        const value = i === null ? null : at === null && data.meanOf ? data.meanOf(it) : it.mean[i];
        const range = it.low && isNumber(it.low[i]) && it.low[i] !== it.high[i]
          ? ` (${format(it.low[i])} to ${format(it.high[i])})` : "";
        const sample = s("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" },
          s("line", { x1: 0, x2: 22, y1: 5, y2: 5, class: `line c${it.colour}`, "stroke-dasharray": Watch.dash(it.dash || 0) }));
        const which = at === null && data.meanOf ? "mean " : "";
        entries.push(h("li", {}, sample, `${it.label} `, which, h("b", {}, format(value)), at === null && data.meanOf ? "" : range));
      }
      legend.replaceChildren(...entries);
      element.setAttribute("aria-label", `${options.title}. ${legend.textContent}`);
    }

    function choose(event) {
      if (!layout || !layout.series.length) return;
      const box = layout.svg.getBoundingClientRect();
      const px = (event.clientX - box.left) * (layout.width / box.width);
      const longest = layout.series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
      let best = null, distance = Infinity;
      longest.x.forEach((value, i) => {
        const away = Math.abs(layout.x.at(value) - px);
        if (isNumber(value) && away < distance) { best = i; distance = away; }
      });
      chosen = best;
      tell();
    }

    element.addEventListener("pointermove", choose);
    element.addEventListener("pointerleave", () => { chosen = null; tell(); });
    element.addEventListener("keydown", (event) => {
      if (!layout) return;
      const num = Math.max(...layout.series.map((it) => it.x.length));
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
      if (event.key === "Escape") chosen = null;
      else if (event.key in moves) chosen = Math.max(0, Math.min(num - 1, (chosen === null ? num - 1 : chosen) + moves[event.key]));
      else return;
      event.preventDefault();
      legend.setAttribute("aria-live", "polite");
      tell();
    });
    element.redraw = draw;
    return { element, update(next) { data = next; draw(); } };
  };

  function lastNumber(values) {
    for (let i = values.length - 1; i >= 0; i--) if (isNumber(values[i])) return i;
    return null;
  }

  function nearest(xs, at) {
    let best = null, distance = Infinity;
    for (let i = 0; i < xs.length; i++) {
      if (isNumber(xs[i]) && Math.abs(xs[i] - at) < distance) { best = i; distance = Math.abs(xs[i] - at); }
    }
    return best;
  }

  // data: [{label, counts, colour}]; bars of each number from 0, as shares, side by side.
  Watch.histogram = (options) => {
    const { element, plot, legend } = figure(options.title, options.hint);
    let data = null;

    function draw() {
      if (!data) return;
      const width = Math.max(220, plot.clientWidth || 400);
      const sums = data.map((it) => it.counts.reduce((sum, count) => sum + count, 0));
      if (!sums.some((sum) => sum > 0)) {
        const none = h("div", { class: "none" }, options.empty || "No values yet");
        none.style.height = `${HEIGHT}px`;
        plot.replaceChildren(none);
        legend.replaceChildren();
        return;
      }
      const num = Math.max(...data.map((it) => it.counts.length));
      const high = Math.max(...data.map((it, i) => Math.max(...it.counts) / (sums[i] || 1)));
      const y = axis(0, high * 1.08, HEIGHT - BOTTOM, TOP, false, 4);
      const slot = (width - LEFT - RIGHT) / num;
      const every = Math.max(1, Math.ceil(26 / slot));
      const marks = [...Array(num).keys()].filter((i) => i % every === 0);
      const x = { at: (value) => LEFT + (value + 0.5) * slot, marks, step: 1 };
      const svg = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, "aria-hidden": "true" });
      frame(svg, x, y, width, (mark) => (mark >= 64 ? "64+" : String(mark)), Watch.percent, options.xLabel);
      const wide = Math.max(1, Math.min(slot * 0.8, 90) / data.length);
      data.forEach((it, k) => {
        it.counts.forEach((count, number) => {
          if (!count) return;
          const share = count / sums[k];
          const left = x.at(number) - (wide * data.length) / 2 + k * wide;
          const bar = s("rect", {
            x: left, y: y.at(share), width: Math.max(1, wide - 1), height: Math.max(1, HEIGHT - BOTTOM - y.at(share)),
            class: `c${it.colour}`, stroke: "none", rx: 1.5,
          });
          bar.append(s("title", {}, `${it.label}: ${number}: ${Watch.percent(share)} (${Watch.count(count)})`));
          svg.append(bar);
          if (wide > 34) svg.append(s("text", { x: left + wide / 2, y: y.at(share) - 3, "text-anchor": "middle" }, Watch.percent(share)));
        });
      });
      plot.replaceChildren(svg);
      legend.replaceChildren(...data.map((it, k) => {
        const mean = it.counts.reduce((sum, count, number) => sum + count * number, 0) / (sums[k] || 1);
        return h("li", {}, s("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" },
          s("rect", { x: 4, y: 0, width: 12, height: 10, class: `c${it.colour}` })),
        `${it.label} `, h("b", {}, `mean ${Watch.number(mean)}`), ` of ${Watch.count(sums[k])} ${options.unit}`);
      }));
      element.setAttribute("aria-label", `${options.title}. ${legend.textContent}`);
    }
    element.redraw = draw;
    return { element, update(next) { data = next; draw(); } };
  };
})();
