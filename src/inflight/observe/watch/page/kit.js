// Elements, numbers as text, colours. Text from a run only ever becomes text nodes, never markup.
"use strict";
const Watch = {};

(() => {
  const SVG = "http://www.w3.org/2000/svg";

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return element;
  }

  Watch.h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  Watch.s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  Watch.byId = (id) => document.getElementById(id);

  const is = (value) => typeof value === "number" && Number.isFinite(value);
  Watch.isNumber = is;

  Watch.number = (value) => {
    if (!is(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && size < 0.001) return value.toExponential(1).replace("e-", "e−");
    if (size >= 1e9) return `${trim(value / 1e9)}G`;
    if (size >= 1e6) return `${trim(value / 1e6)}M`;
    if (size >= 1e4) return `${trim(value / 1e3)}k`;
    return trim(value);
  };

  function trim(value) {
    const text = Number(value.toPrecision(3));
    return Math.abs(text) >= 1000 ? text.toLocaleString("en") : String(text);
  }

  Watch.count = (value) => (is(value) ? Math.round(value).toLocaleString("en") : "–");
  Watch.percent = (value) => (is(value) ? `${trim(value * 100)} %` : "–");

  Watch.seconds = (value) => {
    if (!is(value)) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 1e-3) return `${trim(value * 1e6)} µs`;
    if (size < 1) return `${trim(value * 1e3)} ms`;
    if (size < 120) return `${trim(value)} s`;
    if (size < 7200) return `${Math.floor(value / 60)} min ${String(Math.round(value % 60)).padStart(2, "0")} s`;
    const hours = Math.floor(value / 3600);
    return `${hours} h ${String(Math.round((value % 3600) / 60)).padStart(2, "0")} min`;
  };

  // A time since the run began, as on a clock; the step between marks says how exact it has to be.
  Watch.clock = (value, step) => {
    if (!is(value)) return "–";
    const digits = step < 1 ? Math.min(6, Math.ceil(-Math.log10(step) - 1e-9)) : 0;
    if (value < 60 || step < 1) return `${value.toFixed(digits)} s`;
    const hours = Math.floor(value / 3600), minutes = Math.floor((value % 3600) / 60), rest = Math.floor(value % 60);
    const two = (it) => String(it).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
  };

  // Steps of 1, 2 and 5 times powers of ten, or of minutes and hours.
  Watch.niceStep = (range, count, isTime) => {
    const rough = range / Math.max(1, count);
    if (isTime && rough > 5) {
      for (const step of [10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200]) {
        if (step >= rough) return step;
      }
      return Math.ceil(rough / 86400) * 86400;
    }
    const power = 10 ** Math.floor(Math.log10(rough || 1));
    for (const factor of [1, 2, 5, 10]) if (factor * power >= rough * 0.999) return factor * power;
    return 10 * power;
  };

  Watch.shortServer = (name) => name.replace(/^[a-z+]*:\/\//, "");
  Watch.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  Watch.NUM_VERSION_COLOURS = 6;
  Watch.versionClass = (version) => `f${((version % 6) + 6) % 6}`;

  Watch.theme = (() => {
    const root = document.documentElement;
    const listeners = [];
    const store = (() => { try { return window.localStorage; } catch (_) { return null; } })();
    const kept = store && store.getItem("inflight-theme");
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
    const media = window.matchMedia("(prefers-color-scheme: dark)");
    const notify = () => listeners.forEach((call) => call());
    media.addEventListener("change", notify);
    return {
      isDark: () => (root.dataset.theme ? root.dataset.theme === "dark" : media.matches),
      toggle() {
        root.dataset.theme = this.isDark() ? "light" : "dark";
        if (store) store.setItem("inflight-theme", root.dataset.theme);
        notify();
      },
      listen: (call) => listeners.push(call),
    };
  })();
})();
