"use strict";
// Draws the charts as SVG: axes, curves, a read-out at the pointer, and a selection that enlarges a part.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const MARGIN = { left: 58, right: 12, top: 8 };
  const DASHES = ["", "7 4", "2 4", "9 3 2 3"];
  const X_TITLES = { step: "step", tokens: "tokens", time: "training time" };
  // Values that do not vary at random.
  const EXACT = new Set(["lr", "loss_scale", "num_zeros"]);
  const MOST_MARKED = 60;
  const FEWEST_SMOOTHED = 30;

  const { charts, runs } = JSON.parse(document.getElementById("curves-data").textContent);
  const tools = document.querySelector(".curve-tools");
  const hash = new URLSearchParams(location.hash.slice(1));
  const state = {
    x: hash.get("x") in X_TITLES ? hash.get("x") : "step",
    y: hash.get("y") === "log" ? "log" : "linear",
    smoothing: Math.min(Math.max(Number(hash.get("smoothing") ?? 0.6) || 0, 0), 0.99),
    hidden: new Set(),
    zoom: null,
  };

  const element = (name, attributes = {}, ...children) => {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const shape = (name, attributes, ...children) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };

  // Numbers in words.
  const withUnit = (value, units, digits) => {
    if (value === 0) return "0";
    const found = units.find(([size]) => Math.abs(value) >= size) || units[units.length - 1];
    return trimmed((value / found[0]).toPrecision(digits)) + found[1];
  };
  const trimmed = (text) => (/\.\d*0+$/.test(text) ? text.replace(/\.?0+$/, "") : text);
  const plain = (value, digits) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return trimmed(value.toExponential(Math.min(digits - 1, 3)).split("e")[0]) + "e" + value.toExponential().split("e")[1].replace("+", "");
    return trimmed(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size + 1)))));
  };
  const COUNTS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "K"], [1, ""]];
  const FORMATS = {
    plain,
    exponent: (value, digits) => (value === 0 ? "0" : trimmed(value.toExponential(digits - 1).split("e")[0]) + "e" + Math.floor(Math.log10(Math.abs(value)) + 1e-9)),
    count: (value, digits) => withUnit(value, COUNTS, digits),
    integer: (value) => Math.round(value).toLocaleString("en-US"),
    bytes: (value, digits) => withUnit(value, [[1e12, " TB"], [1e9, " GB"], [1e6, " MB"], [1e3, " KB"], [1, " B"]], digits),
    seconds: (value, digits) => withUnit(value, [[3600, " h"], [60, " min"], [1, " s"], [1e-3, " ms"]], digits),
    percent: (value, digits) => trimmed((100 * value).toPrecision(digits)) + "%",
  };
  const X_FORMATS = { step: FORMATS.integer, tokens: FORMATS.count, time: FORMATS.seconds };

  // Returns the position of a step on the x axis. Tokens and times between known steps are interpolated.
  const positionOf = (run, step) => {
    if (state.x === "step") return step;
    const { step: steps, [state.x]: values } = run.axis;
    let low = 0, high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    if (low === steps.length) return values[low - 1] ?? 0;
    const [step0, value0] = low > 0 ? [steps[low - 1], values[low - 1]] : [0, 0];
    const part = steps[low] > step0 ? (step - step0) / (steps[low] - step0) : 1;
    return value0 + part * (values[low] - value0);
  };

  // Returns an exponential moving average without the bias to its start.
  const smoothed = (values, weight) => {
    let sum = 0, norm = 0;
    return values.map((value) => {
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  };

  // Returns the curves of a chart for the runs that are shown.
  const curvesOf = (chart) => runs.flatMap((run, runIndex) => chart.lines.flatMap((line, lineIndex) => {
    const series = run.series[line.key];
    if (!series || state.hidden.has(runIndex)) return [];
    const isExact = EXACT.has(line.key) || line.key.includes("eval") || series.value.length < FEWEST_SMOOTHED;
    const x = series.step.map((step) => positionOf(run, step));
    const weight = isExact ? 0 : state.smoothing;
    const single = runs.length === 1;
    return [{
      key: line.key, runIndex, series, x, line, weight,
      values: weight > 0 ? smoothed(series.value, weight) : series.value,
      color: "var(--run-" + ((single ? lineIndex : runIndex) % 8) + ")",
      dash: single ? "" : DASHES[lineIndex % DASHES.length],
      label: single ? line.label : runs[runIndex].label + (chart.lines.length > 1 ? ", " + line.label : ""),
      isMarked: series.value.length <= (line.key.includes("eval") ? MOST_MARKED : FEWEST_SMOOTHED),
      notFinite: (series.not_finite || []).map((step) => [step, positionOf(run, step)]),
    }];
  }));

  const rangeOf = (numbers) => numbers.reduce(([low, high], n) => [Math.min(low, n), Math.max(high, n)], [Infinity, -Infinity]);
  const niceStep = (span, most) => {
    const power = 10 ** Math.floor(Math.log10(span / most));
    return [1, 2, 2.5, 5, 10].map((n) => n * power).find((step) => step >= (span / most) * (1 - 1e-9));
  };
  const linearTicks = (from, to, most, unit = 1) => {
    const step = niceStep((to - from) / unit, most) * unit;
    const first = Math.ceil(from / step - 1e-9);
    return Array.from({ length: Math.max(Math.floor(to / step + 1e-9) - first + 1, 0) }, (_, i) => (first + i) * step);
  };
  const logTicks = (from, to, most) => {
    const decades = Math.log10(to / from);
    const factors = decades > 3 ? [1] : [1, 2, 5];
    const every = Math.ceil(decades / most) || 1;
    const ticks = [];
    for (let power = Math.floor(Math.log10(from)); power <= Math.log10(to); power++) {
      if (factors.length === 1 && power % every) continue;
      factors.map((n) => n * 10 ** power).filter((n) => n >= from && n <= to).forEach((n) => ticks.push(n));
    }
    return ticks.length > 1 ? ticks : linearTicks(from, to, most);
  };

  // Returns the range of x over all charts, so that they are aligned.
  const xRange = () => {
    if (state.zoom) return state.zoom;
    const steps = runs.filter((_, i) => !state.hidden.has(i)).flatMap((run) => Object.values(run.series).flatMap((series) =>
      [...series.step.slice(0, 1), ...series.step.slice(-1), ...(series.not_finite || [])].map((step) => positionOf(run, step))));
    const [from, to] = rangeOf(steps);
    if (!(to >= from)) return [0, 1];
    return from === to ? [from - 0.5, to + 0.5] : [from, to];
  };
  const yRange = (curves, [from, to]) => {
    const isLog = state.y === "log";
    const inside = curves.flatMap(({ x, series }) => x.flatMap((at, i) => {
      if (at < from || at > to) return [];
      return [series.value[i], (series.low || series.value)[i], (series.high || series.value)[i]];
    })).filter((value) => !isLog || value > 0);
    const [low, high] = rangeOf(inside);
    if (!(high >= low)) return null;
    if (isLog) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
    const pad = high > low ? 0.05 * (high - low) : Math.abs(high) * 0.05 || 1;
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  };
  const yTicks = (unit, [low, high], most) => {
    if (state.y === "log") return logTicks(low, high, most);
    const bases = unit === "seconds" ? [3600, 60, 1] : [1];
    return linearTicks(low, high, most, bases.find((base) => high >= 3 * base) || 1);
  };
  const xTicks = ([from, to], most) => {
    const base = state.x === "time" ? [3600, 60, 1].find((n) => to >= 3 * n) || 1 : 1;
    const ticks = linearTicks(from, to, most, base);
    return state.x === "step" ? ticks.filter((tick) => Number.isInteger(Number(tick.toPrecision(12)))) : ticks;
  };

  const pathOf = (xs, ys) => xs.map((x, i) => (i ? "L" : "M") + x.toFixed(1) + " " + ys[i].toFixed(1)).join("");

  class ChartView {
    constructor(chart, isWide) {
      this.chart = chart;
      this.isWide = isWide;
      this.height = isWide ? 330 : 205;
      this.svg = shape("svg", { role: "img", "aria-label": chart.title });
      this.readout = element("div", { class: "readout", hidden: "" });
      this.caption = element("figcaption");
      this.figure = element("figure", { class: isWide ? "chart wide-chart" : "chart" }, this.caption, this.svg, this.readout);
      this.svg.addEventListener("pointermove", (event) => this.follow(event));
      this.svg.addEventListener("pointerleave", () => this.leave());
      this.svg.addEventListener("pointerdown", (event) => (this.pressed = event.button === 0 ? this.offset(event) : null));
      this.svg.addEventListener("pointerup", (event) => this.release(event));
      this.svg.addEventListener("dblclick", () => zoomTo(null));
    }

    draw() {
      const { chart, height } = this;
      const width = Math.max(this.figure.clientWidth, 240);
      const curves = (this.curves = curvesOf(chart));
      const [from, to] = (this.xRange = xRange());
      const range = yRange(curves, this.xRange);
      this.right = width - MARGIN.right;
      this.toX = (value) => MARGIN.left + ((value - from) / (to - from)) * (this.right - MARGIN.left);
      this.svg.setAttribute("viewBox", "0 0 " + width + " " + height);
      this.svg.setAttribute("height", height);
      this.leave();
      this.showCaption();
      const bottom = this.bottom = height - (this.isWide ? 34 : 24);
      const parts = [...this.xAxis(width, bottom)];
      if (range) {
        const position = state.y === "log" ? Math.log10 : (value) => value;
        const [low, high] = range.map(position);
        this.toY = (value) => bottom - ((position(value) - low) / (high - low)) * (bottom - MARGIN.top);
        parts.push(...this.yAxis(range, bottom), this.plot(curves, bottom));
      } else {
        const text = curves.length ? "no positive values for a logarithmic axis" : "no values in the runs shown";
        parts.push(shape("text", { class: "message", x: width / 2, y: height / 2 }, text));
      }
      this.svg.replaceChildren(...parts);
    }

    showCaption() {
      const labels = new Map(this.curves.map((curve) => [curve.label, curve]));
      const isNeeded = this.chart.lines.length > 1;
      const lines = runs.length === 1 ? [...labels.values()] : [...new Map(this.curves.map((curve) => [curve.line.label, curve])).values()];
      const legend = lines.map((curve) => {
        const sample = shape("svg", { width: 22, height: 8, style: "display:inline;width:22px" },
          shape("path", { d: "M1 4H21", class: "curve", style: "stroke:" + (runs.length === 1 ? curve.color : "var(--soft)"), "stroke-dasharray": curve.dash }));
        return element("span", {}, sample, " " + curve.line.label);
      });
      this.caption.replaceChildren(element("b", {}, this.chart.title), ...(isNeeded ? legend : []));
    }

    xAxis(width, bottom) {
      const ticks = xTicks(this.xRange, Math.max(Math.floor(width / 90), 2));
      return [
        ...ticks.flatMap((tick) => [
          shape("line", { class: "grid", x1: this.toX(tick), x2: this.toX(tick), y1: bottom, y2: bottom + 4 }),
          this.xLabel(tick, bottom),
        ]),
        ...(this.isWide ? [shape("text", { x: this.right, y: bottom + 30, "text-anchor": "end" }, X_TITLES[state.x])] : []),
      ];
    }

    // A label at the right edge ends there, because the page cuts off what is beyond.
    xLabel(tick, bottom) {
      const text = X_FORMATS[state.x](tick, 4), x = this.toX(tick);
      const isAtEdge = x + 3.5 * text.length > this.right + MARGIN.right;
      const place = isAtEdge ? { x: this.right + MARGIN.right, "text-anchor": "end" } : { x, "text-anchor": "middle" };
      return shape("text", { ...place, y: bottom + 16 }, text);
    }

    yAxis(range, bottom) {
      const format = FORMATS[this.chart.unit] || plain;
      return yTicks(this.chart.unit, range, Math.max(Math.floor((bottom - MARGIN.top) / 32), 2)).flatMap((tick) => [
        shape("line", { class: "grid", x1: MARGIN.left, x2: this.right, y1: this.toY(tick), y2: this.toY(tick) }),
        shape("text", { x: MARGIN.left - 6, y: this.toY(tick) + 4, "text-anchor": "end" }, format(tick, 4)),
      ]);
    }

    plot(curves, bottom) {
      const id = "clip-" + charts.indexOf(this.chart);
      const box = { x: MARGIN.left - 4, y: MARGIN.top - 4, width: this.right - MARGIN.left + 8, height: bottom - MARGIN.top + 8 };
      const lines = runs.flatMap((run, i) => (state.hidden.has(i) ? [] : run.resumes).map((step) => {
        const x = this.toX(positionOf(run, step)), style = runs.length > 1 ? "stroke:var(--run-" + (i % 8) + ")" : "";
        return shape("line", { class: "resume", x1: x, x2: x, y1: MARGIN.top, y2: bottom, style });
      }));
      const group = shape("g", { "clip-path": "url(#" + id + ")" }, ...lines, ...curves.flatMap((curve) => this.curve(curve)));
      this.cross = shape("g", {});
      return shape("g", {}, shape("clipPath", { id }, shape("rect", box)), group, this.cross);
    }

    curve(curve) {
      const { x, series, values, color, dash } = curve;
      const isDrawn = (i) => state.y !== "log" || (values[i] > 0 && series.value[i] > 0);
      const at = x.map((_, i) => i).filter(isDrawn);
      const xs = at.map((i) => this.toX(x[i]));
      const y = (of) => at.map((i) => this.toY(of[i]));
      const parts = [];
      if (series.low) {
        const low = y(series.low.map((value, i) => (state.y === "log" && value <= 0 ? series.value[i] : value)));
        const outline = pathOf(xs, y(series.high)) + pathOf([...xs].reverse(), low.reverse()).replace("M", "L") + "Z";
        parts.push(shape("path", { class: "band", d: outline, style: "fill:" + color + ";stroke:" + color }));
      }
      if (values !== series.value) {
        parts.push(shape("path", { class: "curve recorded", d: pathOf(xs, y(series.value)), style: "stroke:" + color }));
      }
      const names = { class: "curve", "data-key": curve.key, "data-run": curve.runIndex, "stroke-dasharray": dash };
      parts.push(shape("path", { ...names, d: pathOf(xs, y(values)), style: "stroke:" + color }));
      if (curve.isMarked) {
        const ys = y(values);
        xs.forEach((cx, i) => parts.push(shape("circle", { cx, cy: ys[i], r: 2.6, style: "fill:" + color })));
      }
      curve.notFinite.forEach(([step, at]) => parts.push(shape("path", { class: "not-finite", d: "M" + this.toX(at).toFixed(1) + " " + (MARGIN.top - 4) + "v9" },
        shape("title", {}, curve.label + ": not finite at step " + step))));
      return parts;
    }

    offset(event) {
      const box = this.svg.getBoundingClientRect();
      return event.clientX - box.left;
    }

    toValue(pixel) {
      const [from, to] = this.xRange;
      const part = (pixel - MARGIN.left) / (this.right - MARGIN.left);
      return from + Math.min(Math.max(part, 0), 1) * (to - from);
    }

    // Shows the values nearest to the pointer.
    follow(event) {
      if (!this.toY || !this.cross || !this.curves.length) return;
      const { bottom } = this, pixel = this.offset(event), value = this.toValue(pixel);
      const nearest = this.curves.filter((curve) => curve.x.length).map((curve) => {
        const i = curve.x.reduce((best, at, i) => (Math.abs(at - value) < Math.abs(curve.x[best] - value) ? i : best), 0);
        return { curve, i };
      });
      if (!nearest.length) return;
      const closest = nearest.reduce((a, b) => (Math.abs(b.curve.x[b.i] - value) < Math.abs(a.curve.x[a.i] - value) ? b : a));
      const at = this.toX(closest.curve.x[closest.i]);
      const dots = nearest.filter(({ curve, i }) => state.y !== "log" || curve.values[i] > 0).map(({ curve, i }) =>
        shape("circle", { cx: this.toX(curve.x[i]), cy: this.toY(curve.values[i]), r: 3.5, style: "fill:" + curve.color }));
      const marks = [shape("line", { class: "cross", x1: at, x2: at, y1: MARGIN.top, y2: bottom }), ...dots];
      if (this.pressed != null && Math.abs(pixel - this.pressed) > 4) {
        const left = Math.max(Math.min(pixel, this.pressed), MARGIN.left);
        marks.push(shape("rect", { class: "selection", x: left, width: Math.max(pixel, this.pressed) - left, y: MARGIN.top, height: bottom - MARGIN.top }));
      }
      this.cross.replaceChildren(...marks);
      this.showReadout(closest, nearest, at);
    }

    showReadout(closest, nearest, at) {
      const format = FORMATS[this.chart.unit] || plain;
      const { curve, i } = closest;
      const step = "step " + curve.series.step[i].toLocaleString("en-US");
      const other = state.x === "step" ? "" : ", " + X_FORMATS[state.x](curve.x[i], 4);
      const rows = nearest.map(({ curve, i }) => {
        const key = element("span", { class: "key", style: "background:" + curve.color });
        const { low, high, value } = curve.series;
        const range = low ? " (" + format(low[i], 5) + " to " + format(high[i], 5) + ")" : "";
        const average = curve.weight > 0 ? ", smoothed " + format(curve.values[i], 5) : "";
        return element("p", {}, key, curve.label + ": " + format(value[i], 5) + range + average);
      });
      this.readout.replaceChildren(element("p", {}, element("b", {}, step), other), ...rows);
      this.readout.hidden = false;
      const width = this.readout.offsetWidth, space = this.figure.clientWidth;
      const left = at + 14 + width > space ? Math.max(at - 14 - width, 0) : at + 14;
      this.readout.style.left = left + "px";
      this.readout.style.top = this.caption.offsetHeight + 14 + "px";
    }

    release(event) {
      const start = this.pressed, end = this.offset(event);
      this.pressed = null;
      if (start != null && Math.abs(end - start) > 8) zoomTo([start, end].map((pixel) => this.toValue(pixel)).sort((a, b) => a - b));
    }

    leave() {
      this.pressed = null;
      this.readout.hidden = true;
      if (this.cross) this.cross.replaceChildren();
    }
  }

  const views = charts.map((chart, i) => new ChartView(chart, i === 0));
  document.querySelector(".charts").replaceChildren(...views.map((view) => view.figure));

  const redraw = () => {
    views.forEach((view) => view.draw());
    tools.querySelector(".unzoom").disabled = !state.zoom;
    tools.querySelector("output").value = state.smoothing.toFixed(2);
  };
  const zoomTo = (range) => {
    state.zoom = range;
    redraw();
  };
  const remember = () => {
    const { x, y, smoothing } = state;
    history.replaceState(null, "", "#" + new URLSearchParams({ x, y, smoothing }));
    redraw();
  };

  for (const name of ["x", "y", "smoothing"]) {
    const input = tools.querySelector('[name="' + name + '"]');
    input.value = state[name];
    input.addEventListener("input", () => {
      state[name] = name === "smoothing" ? Number(input.value) : input.value;
      if (name === "x") state.zoom = null;
      remember();
    });
  }
  if (runs.length > 1) {
    tools.querySelector(".shown-runs").append(...runs.map((run, i) => {
      const key = element("span", { class: "key", style: "background:var(--run-" + (i % 8) + ")" });
      const button = element("button", { type: "button", "aria-pressed": "true" }, key, " " + run.label);
      button.addEventListener("click", () => {
        if (!state.hidden.delete(i)) state.hidden.add(i);
        button.setAttribute("aria-pressed", String(!state.hidden.has(i)));
        redraw();
      });
      return button;
    }));
  }
  tools.querySelector(".unzoom").addEventListener("click", () => zoomTo(null));
  tools.hidden = !charts.length;
  new ResizeObserver(redraw).observe(document.querySelector(".charts"));
  redraw();
})();
