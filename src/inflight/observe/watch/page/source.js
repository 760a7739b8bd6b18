// The source of the page's data: the server that follows the run, or the data embedded in a report.
"use strict";

(() => {
  class Served {
    constructor(token) {
      this.token = token;
      this.isLive = true;
    }

    async get(path, query) {
      const address = `api/${path}${query ? `?${new URLSearchParams(query)}` : ""}`;
      const answer = await fetch(address, { headers: { authorization: `Bearer ${this.token}` } });
      const body = await answer.json().catch(() => ({}));
      if (!answer.ok) throw new Error(body.error || `the server answered with status ${answer.status}`);
      return body;
    }

    runs() { return this.get("runs"); }
    overview(run, names) { return this.get(`runs/${run}`, { names: names.join(",") }); }
    timeline(run, from, to, width) { return this.get(`runs/${run}/timeline`, { from, to, width: Math.round(width) }); }
    rollouts(run, query) { return this.get(`runs/${run}/rollouts`, query); }
    rollout(run, item) { return this.get(`runs/${run}/rollouts/${item}`); }

    // Calls `changed` with the numbers of runs that have changed, forever, reconnecting when the server restarts.
    async follow(changed, connected) {
      for (;;) {
        try {
          const answer = await fetch("api/follow", { headers: { authorization: `Bearer ${this.token}` } });
          if (!answer.ok) throw new Error(String(answer.status));
          connected(true);
          const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
          let rest = "";
          for (;;) {
            const { value, done } = await reader.read();
            if (done) break;
            const events = (rest + value).split("\n\n");
            rest = events.pop();
            for (const event of events) {
              const data = event.split("\n").find((line) => line.startsWith("data: "));
              if (data) changed(JSON.parse(data.slice(6)));
            }
          }
        } catch (_) { /* the server has ended, or has not started yet */ }
        connected(false);
        await new Promise((resolve) => setTimeout(resolve, 2000));
      }
    }
  }

  class Embedded {
    constructor(data) {
      this.data = data;
      this.isLive = false;
    }

    async runs() { return this.data.runs.map((run) => ({ name: run.overview.name, directory: run.overview.directory })); }
    async overview(run) { return this.data.runs[run].overview; }

    // Uses the level whose tiles fit the window best, and the parts of its tiles that overlap the window.
    async timeline(run, from, to) {
      const levels = this.data.runs[run].timeline;
      const end = levels[0][0].to_s;
      const wanted = Math.min(levels.length - 1, Math.floor(Math.log(Math.max(1, end / (to - from))) / Math.log(4)));
      const tiles = levels[wanted].filter((tile) => tile.to_s >= from && tile.from_s <= to);
      const lanes = new Map();
      for (const tile of tiles.length ? tiles : [levels[0][0]]) {
        for (const lane of tile.lanes) {
          if (!lanes.has(lane.key)) lanes.set(lane.key, { ...lane, spans: [], pieces: [] });
          const joined = lanes.get(lane.key);
          if (lane.bins) joined.pieces.push({ from_s: tile.from_s, to_s: tile.to_s, bins: lane.bins });
          else {
            const known = new Set(joined.spans.map((span) => `${span[0]},${span[2]}`));
            joined.spans.push(...lane.spans.filter((span) =>
              span[1] >= from && span[0] <= to && !known.has(`${span[0]},${span[2]}`)));
          }
        }
      }
      const marks = levels[0][0].marks.filter((mark) => mark.time_s >= from && mark.time_s <= to);
      return { from_s: from, to_s: to, end_s: end, lanes: [...lanes.values()], marks };
    }

    async rollouts(run, query) {
      const { items, counts } = this.data.runs[run].rollouts;
      const found = items.filter((item) => !query.state || item.state === query.state);
      const mean = (item) => item.rewards.reduce((sum, it) => sum + it, 0) / item.rewards.length;
      const age = (item) => (item.version === null || item.oldest === null ? -1 : item.version - item.oldest);
      const orders = {
        newest: (item) => (item.state === "unfinished" ? item.end_s - 1e12 : item.end_s),
        reward: (item) => (item.rewards.length ? mean(item) : -1e300),
        length: (item) => item.lengths.reduce((sum, it) => sum + it, 0),
        age,
      };
      const key = orders[query.order] || orders.newest;
      found.sort((a, b) => key(b) - key(a));
      const offset = Number(query.offset) || 0;
      return { total: found.length, counts, offset, items: found.slice(offset, offset + Number(query.limit || 50)) };
    }

    async rollout(run, item) {
      const found = this.data.runs[run].details[item];
      if (!found) throw new Error(`the report has no details of item ${item}: open the run with inflight watch`);
      return found;
    }

    follow() {}
  }

  Watch.openSource = () => {
    const embedded = Watch.byId("data");
    if (embedded) return new Embedded(JSON.parse(embedded.textContent));
    const given = new URLSearchParams(window.location.hash.slice(1)).get("token");
    if (given) {
      sessionStorage.setItem("inflight-token", given);
      window.history.replaceState(null, "", window.location.pathname);
    }
    return new Served(given || sessionStorage.getItem("inflight-token") || "");
  };
})();
