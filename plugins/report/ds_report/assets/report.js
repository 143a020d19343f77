"use strict";
// Draws the charts again when a setting changes, and shows values. Without it the page stands as it was made.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const settings = { axis: data.base, smooth: 0, log: false, clip: false, hidden: new Set() };
  const figures = new Map([...document.querySelectorAll(".chart")].map((f) => [f.dataset.key, f]));
  const names = { step: "step", samples: "sample", hours: "" };

  function on(run, axis, x) { // x of the base on another axis, between the places that are known
    if (axis === data.base) return x;
    const table = data.axes[run][axis];
    if (!table || x === null) return null;
    const [xs, ys] = table;
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] <= x) low = mid; else high = mid; }
    const span = xs[high] - xs[low];
    return span ? ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / span : ys[low];
  }

  function smoothed(ys) { // exponential, corrected for its start
    const weight = settings.smooth;
    let sum = 0, total = 0;
    return ys.map((y) => {
      if (y === null) return null;
      sum = sum * weight + y * (1 - weight); total = total * weight + (1 - weight);
      return sum / total;
    });
  }

  function niceTicks(low, high, count) {
    if (!(high > low)) { const spread = Math.abs(low) * 0.1 || 1; low -= spread; high += spread; }
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const ticks = [];
    for (let i = Math.floor(low / step + 1e-9); i <= Math.ceil(high / step - 1e-9); i++) ticks.push(i * step);
    return [ticks, step];
  }

  function short(value, step) {
    if (Math.abs(value) < step * 1e-6) return "0";
    const size = Math.max(Math.abs(value), step);
    if (size >= 1e15 || size < 1e-3 || (step < 1e-3 && size < 0.01)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
    for (const [unit, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]]) {
      if (size >= unit * (sign === "k" ? 10 : 1) || unit === 1) {
        let digits = step < unit ? Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9)) : 0;
        if ((step / unit) * 10 ** digits % 1 > 1e-6) digits += 1;
        return (value / unit).toFixed(digits) + sign;
      }
    }
  }

  function full(value) {
    if (value === null) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
    return size !== 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential(3) : String(+value.toPrecision(5));
  }

  function hours(value) {
    const seconds = Math.round(value * 3600), h = Math.floor(seconds / 3600), m = Math.floor(seconds / 60) % 60, s = seconds % 60;
    return h ? `${h} h ${m} min` : m ? `${m} min ${s} s` : `${(value * 3600).toFixed(value * 3600 < 10 ? 1 : 0)} s`;
  }

  function timeTicks(low, high) { // round seconds, minutes or hours
    const span = (high - low) * 3600;
    const [unit, sign] = span < 120 ? [1, "s"] : span < 7200 ? [60, "min"] : span < 345600 ? [3600, "h"] : [86400, "d"];
    const [ticks, step] = niceTicks(low * 3600 / unit, high * 3600 / unit, 5);
    return ticks.map((t) => [t * unit / 3600, `${short(t, step)} ${sign}`]);
  }

  function draw(chart) {
    const figure = figures.get(chart.key), svg = figure.querySelector("svg");
    const lines = chart.lines.filter((l) => !settings.hidden.has(l.run)).map((l) => {
      const cut = l.mx.length > 0, trend = cut || settings.smooth > 0, place = (x) => on(l.run, settings.axis, x);
      const y = cut ? l.my : l.y, at = l.x.map(place);
      return { ...l, trend, raw: at, at: cut ? l.mx.map(place) : at, shown: settings.smooth ? smoothed(y) : y };
    });
    const log = settings.log, xs = [], ys = [];
    for (const l of lines) l.raw.forEach((x, i) => {
      const y = l.y[i];
      if (x !== null && y !== null && (!log || y > 0)) { xs.push(x); ys.push(y); }
    });
    if (settings.clip && ys.length > 20) {
      const sorted = [...ys].sort((a, b) => a - b), cut = Math.floor(ys.length * 0.01) + 1;
      ys.length = 0; ys.push(sorted[cut], sorted[sorted.length - 1 - cut]);
    }
    const scale = log ? Math.log10 : (v) => v, least = (a) => a.reduce((m, v) => Math.min(m, v), Infinity), most = (a) => a.reduce((m, v) => Math.max(m, v), -Infinity);
    let low = ys.length ? scale(least(ys)) : 0, high = ys.length ? scale(most(ys)) : 1, ticks;
    if (log) {
      const [exponents] = niceTicks(low, high, 4);
      ticks = exponents.some((e) => e % 1) ? exponents.map((e) => [e, short(+(10 ** e).toPrecision(2), 10 ** e / 10)]) : exponents.map((e) => [e, short(10 ** e, 10 ** e)]);
    } else {
      if (chart.zero) low = Math.min(low, 0);
      const [places, step] = niceTicks(low, high, 4);
      ticks = places.map((t) => [t, short(t, step)]);
    }
    const spread = high - low;
    const floor = !log && low >= 0 ? 0 : -Infinity;
    low = Math.max(floor, low - spread * 0.04); high += spread * 0.04;
    if (!(high > low)) { low = ticks[0][0]; high = ticks[ticks.length - 1][0]; }
    let left = xs.length ? least(xs) : 0, right = xs.length ? most(xs) : 1;
    if (left > 0 && left <= right * 0.02) left = 0;
    if (left === right) { left -= 1; right += 1; }
    const [steps, step] = niceTicks(left, right, 5);
    const across = settings.axis === "hours" ? timeTicks(left, right) : steps.map((t) => [t, short(t, step)]);
    const px = (x) => (x - left) / (right - left) * 1000, py = (y) => 1000 - (scale(y) - low) / (high - low) * 1000;
    const path = (at, y) => {
      let text = "", pen = "M";
      at.forEach((x, i) => {
        if (x === null || y[i] === null || (log && y[i] <= 0)) { pen = "M"; return; }
        text += `${pen}${+px(x).toFixed(2)} ${+Math.max(-4000, Math.min(5000, py(y[i]))).toFixed(2)}`; pen = "L";
      });
      return text;
    };
    const inside = (list, from, to) => list.map(([v, t]) => [(v - from) / (to - from) * 100, t]).filter(([p]) => p >= -0.01 && p <= 100.01);
    const rows = inside(ticks, low, high);
    svg.querySelector(".grid").replaceChildren(...rows.map(([p]) => shape(`M0 ${1000 - p * 10}H1000`, "")));
    const dashed = (run) => `c${run % 8}${run >= 8 ? " dashed" : ""}`;
    const many = new Map();
    svg.querySelector(".lines").replaceChildren(...lines.flatMap((l) => {
      const nth = many.get(l.run) || 0; many.set(l.run, nth + 1);
      const main = shape(path(l.at, l.shown), dashed(l.run) + (nth ? " faint" : ""));
      const raw = shape(path(l.trend ? l.raw : [], l.y), dashed(l.run) + " raw");
      return [raw, main];
    }).sort((a, b) => b.classList.contains("raw") - a.classList.contains("raw")));
    svg.style.clipPath = settings.clip ? "inset(-2px)" : "";
    labels(figure.querySelector(".ys"), rows.map(([p, t]) => [100 - p, t]), "top");
    labels(figure.querySelector(".xs"), inside(across, left, right), "left");
    figure.state = { lines, px: (x) => px(x) / 10, py: (y) => py(y) / 10, left, right, chart, log };
  }

  function shape(d, kind) {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", d);
    if (kind) path.setAttribute("class", kind);
    return path;
  }

  function labels(parent, list, side) {
    parent.replaceChildren(...list.map(([place, text]) => {
      const span = document.createElement("span");
      span.style[side] = `${place}%`; span.textContent = text;
      return span;
    }));
  }

  function nearest(at, x) { // `at` grows
    let best = -1, least = Infinity;
    at.forEach((v, i) => { if (v !== null && Math.abs(v - x) < least) { least = Math.abs(v - x); best = i; } });
    return best;
  }

  function show(figure, share) {
    const { lines, px, py, left, right, chart, log } = figure.state, x = left + (right - left) * share;
    const plot = figure.querySelector(".plot"), cursor = plot.querySelector(".cursor"), tip = plot.querySelector(".tip");
    const found = lines.map((l) => [l, nearest(l.at, x)]).filter(([, i]) => i >= 0);
    if (!found.length) return hide(figure);
    const [first, at] = found.reduce((a, b) => Math.abs(a[0].at[a[1]] - x) <= Math.abs(b[0].at[b[1]] - x) ? a : b);
    const place = first.at[at];
    cursor.hidden = tip.hidden = false;
    cursor.style.left = `${px(place)}%`;
    cursor.replaceChildren(...found.filter(([l, i]) => l.shown[i] !== null && (!log || l.shown[i] > 0)).map(([l, i]) => {
      const dot = document.createElement("i");
      dot.className = `c${l.run % 8}`; dot.style.top = `${Math.max(0, Math.min(100, py(l.shown[i])))}%`;
      dot.style.left = `${(px(l.at[i]) - px(place)) / 100 * plot.clientWidth}px`;
      return dot;
    }));
    const head = document.createElement("div");
    head.className = "at"; head.textContent = settings.axis === "hours" ? hours(place) : `${names[settings.axis]} ${full(Math.round(place))}`;
    tip.replaceChildren(head, ...found.slice(0, 12).map(([l, i]) => {
      const row = document.createElement("div"), mark = document.createElement("i"), what = document.createElement("span"), value = document.createElement("b");
      mark.className = `swatch c${l.run % 8}`; what.className = "what"; what.textContent = l.name;
      value.textContent = full(l.shown[i] === null ? null : l.shown[i]) + (chart.unit ? ` ${chart.unit}` : "");
      row.append(mark, what, value);
      return row;
    }));
    const right_side = share < 0.5;
    tip.style.left = right_side ? `calc(${px(place)}% + 12px)` : ""; tip.style.right = right_side ? "" : `calc(${100 - px(place)}% + 12px)`;
  }

  function hide(figure) { for (const part of figure.querySelectorAll(".cursor, .tip")) part.hidden = true; }

  function drawAll() { data.charts.forEach(draw); }

  for (const figure of figures.values()) {
    const plot = figure.querySelector(".plot");
    let share = 1;
    const follow = (event) => { const box = plot.getBoundingClientRect(); share = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width)); show(figure, share); };
    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
    plot.addEventListener("pointerleave", () => hide(figure));
    plot.addEventListener("blur", () => hide(figure));
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") hide(figure);
      const by = { ArrowLeft: -0.01, ArrowRight: 0.01 }[event.key];
      if (by) { share = Math.max(0, Math.min(1, share + by)); show(figure, share); event.preventDefault(); }
    });
  }
  const listen = (selector, set) => document.querySelectorAll(selector).forEach((input) => input.addEventListener("input", () => { set(input); drawAll(); }));
  listen("input[name=axis]", (input) => { settings.axis = input.value; });
  listen("#smooth", (input) => { settings.smooth = +input.value; input.nextElementSibling.textContent = input.value; });
  listen("#log", (input) => { settings.log = input.checked; });
  listen("#clip", (input) => { settings.clip = input.checked; });
  listen(".toggle", (input) => { settings.hidden[input.checked ? "delete" : "add"](+input.value); });
  document.querySelector(".tools").hidden = false;
  drawAll();
})();
