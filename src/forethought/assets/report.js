"use strict";
// Draws what the page's elements carry as JSON: .plot with Plotly, .film on canvases. Colours come from the style
// sheet, so that plots follow the reader's light or dark setting and print in light.
const root = document.documentElement;
addEventListener("error", event => {
  const note = document.getElementById("failure");
  note.textContent = `A script of this page failed: ${event.message}`;
  note.hidden = false;
});

const colour = role => getComputedStyle(root).getPropertyValue(`--${role}`).trim();
const carried = kind => [...document.querySelectorAll(`.${kind}`)].map(element => {
  const data = JSON.parse(element.firstElementChild.textContent);
  element.replaceChildren();
  return { element, data };
});
const make = (parent, name, attributes = {}, text = "") => {
  const element = parent.appendChild(document.createElement(name));
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
};
// Plotly reads some markup in labels: names from outside are text
const plain = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const faded = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");

// Plots
const dashes = { imagined: "dash", baseline0: "dot", baseline2: "dashdot" };

function traces(data) {
  const list = [];
  for (const trace of data.traces) {
    const ink = colour(trace.role), name = plain(trace.name), hover = "%{y:.4~g}";
    if (trace.box) {
      const marked = trace.middle !== undefined; // instead of a box: a diamond with its interval, beside the dots
      list.push({ type: "box", y: trace.box, name, boxpoints: "all", jitter: 0.5, pointpos: marked ? -0.8 : 0,
        fillcolor: faded(ink, marked ? 0 : 0.12), marker: { color: faded(ink, 0.6), size: marked ? 6 : 4 },
        line: { color: marked ? faded(ink, 0) : ink, width: 1.5 }, hoverinfo: "y", hoveron: marked ? "points" : "boxes+points" });
      if (marked) {
        const [low, high] = trace.interval ?? [trace.middle, trace.middle];
        list.push({ x: [name], y: [trace.middle], mode: "markers", marker: { color: ink, size: 11, symbol: "diamond" },
          error_y: { array: [high - trace.middle], arrayminus: [trace.middle - low], color: ink, thickness: 2, width: 8,
            visible: Boolean(trace.interval) }, hovertemplate: `%{y:.4~g}<extra></extra>` });
      }
      continue;
    }
    if (trace.bar !== undefined) {
      list.push({ type: "bar", x: [name], y: [trace.bar], marker: { color: faded(ink, 0.7) }, hovertemplate: "%{y}<extra></extra>" });
      continue;
    }
    if (trace.points) {
      const apart = edge => edge.map((y, i) => y === null || trace.y[i] === null ? null : Math.abs(y - trace.y[i]));
      const reach = trace.band && { array: apart(trace.band[1]), arrayminus: apart(trace.band[0]), color: ink, thickness: 1.5, width: 4 };
      list.push({ x: trace.x, y: trace.y, mode: "markers", ...(reach && { error_y: reach }), // a cross where something is wrong: not by colour alone
        marker: { color: faded(ink, 0.75), size: 8, symbol: trace.role === "bad" ? "x" : "circle" },
        hovertemplate: `${name}: %{x:.4~g}, %{y:.4~g}<extra></extra>` });
      continue;
    }
    if (trace.band) {
      const floor = Math.min(...trace.y.filter(y => y > 0)) / 10;
      const edge = y => data.log && y !== null ? Math.max(y, floor) : y;
      const side = { x: trace.x, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      list.push({ ...side, y: trace.band[0].map(edge) },
        { ...side, y: trace.band[1].map(edge), fill: "tonexty", fillcolor: faded(ink, 0.18) });
    }
    const several = data.traces.length > 1 && data.traces.some(other => other.role !== trace.role);
    const line = { color: trace.faint ? faded(ink, 0.25) : ink, width: trace.faint ? 1 : 2 };
    if (several) line.dash = dashes[trace.role] ?? "solid";
    list.push({ x: trace.x, y: trace.y, name, line, mode: trace.y.length <= (several ? 1 : 30) ? "lines+markers" : "lines",
      marker: { color: ink, size: 5 }, connectgaps: false, hoverinfo: trace.faint ? "skip" : "all",
      ...(trace.stack && { stackgroup: "all", stackgaps: "interpolate", fillcolor: faded(ink, 0.65), line: { width: 0.5, color: ink } }),
      hovertemplate: trace.faint ? undefined : several || trace.stack ? `${hover}<extra>${name}</extra>` : `${hover}<extra></extra>` });
  }
  return list;
}

function layout(data, width) {
  const soft = colour("soft"), axis = { gridcolor: colour("line"), zeroline: false, automargin: true, nticks: 6,
    fixedrange: touch, linecolor: colour("line"), title: { font: { size: 11 }, standoff: 6 } };
  const boxes = data.traces.some(trace => trace.box || trace.bar !== undefined);
  const loose = boxes || data.traces.some(trace => trace.points);
  const levels = Object.entries(data.levels ?? {});
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: loose ? "closest" : "x unified",
    hoverlabel: { bgcolor: colour("sheet"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12 } },
    font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: soft },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: colour("ink") }, margin: { l: 8, r: 10, t: 8, b: 8 }, dragmode: touch ? false : "zoom", height: 210, width,
    xaxis: { ...axis, nticks: 5, title: { ...axis.title, text: plain(data.x) }, showgrid: false, ticks: boxes ? "" : "outside",
      showticklabels: !data.legend,
      tickcolor: colour("line"), type: boxes ? "category" : "linear" },
    yaxis: { ...axis, title: { ...axis.title, text: plain(data.y) }, type: data.log ? "log" : "linear",
      tickformat: "~g", ...(data.range && !data.log && { range: data.range }) },
    shapes: [
      ...(data.shade ? [{ type: "rect", xref: "x", yref: "paper", x0: data.shade[0], x1: data.shade[1], y0: 0, y1: 1,
        fillcolor: faded(soft, 0.18), line: { width: 0 }, layer: "below" }] : []),
      ...levels.map(([, y], i) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y,
        line: { color: colour(`baseline${i % 3}`), width: 1.5, dash: "dash" } })),
    ],
    annotations: levels.map(([name, y], i) => ({ xref: "paper", x: 1, xanchor: "right", y: data.log ? Math.log10(y) : y, yanchor: i % 2 ? "top" : "bottom",
      text: plain(name), showarrow: false, bgcolor: faded(colour("sheet"), 0.7), borderpad: 0, font: { size: 10, color: colour(`baseline${i % 3}`) } })),
  };
}

const touch = matchMedia("(pointer: coarse)").matches;
const options = { displaylogo: false, displayModeBar: touch ? false : "hover", modeBarButtons: [["toImage", "resetScale2d"]] };
const plots = carried("plot");
const films = carried("film").map(({ element, data }) => ({ element, redraw: film(element, data) }));
const drawPlot = ({ element, data }) => Plotly.react(element, traces(data), layout(data, element.clientWidth), options);
const draw = () => { plots.forEach(drawPlot); films.forEach(film => film.redraw()); };

for (const button of document.querySelectorAll(".switch")) {
  button.addEventListener("click", () => {
    const log = button.getAttribute("aria-pressed") === "false";
    button.setAttribute("aria-pressed", String(log));
    for (const plot of plots.filter(({ element }) => button.parentElement.contains(element))) {
      plot.data.log = log;
      drawPlot(plot);
    }
  });
}

// An episode: scenes of line segments and curves with a mark at the frame that is shown
function film(element, data) {
  const names = { real: "What happened", imagined: "What the model imagined" };
  const extent = bounds(data.scenes);
  const stage = make(element, "div", { class: "scenes" });
  const scenes = data.scenes.map(scene => {
    const box = make(stage, "div");
    make(box, "h4", {}, names[scene.role]);
    return { ...scene, canvas: make(box, "canvas", { role: "img", "aria-label": names[scene.role] }), state: make(box, "h4") };
  });
  const controls = make(element, "div", { class: "controls" });
  const button = make(controls, "button", { type: "button" }, "Play");
  const slider = make(controls, "input", { type: "range", min: 0, max: data.length - 1, value: 0, "aria-label": "step" });
  const output = make(controls, "output");
  const panels = make(element, "div", { class: "panels" });
  const curves = data.curves.map(curve => {
    const box = make(panels, "div", { class: "curve" });
    make(box, "h4", {}, curve.title);
    return { ...curve, canvas: make(box, "canvas", { role: "img", "aria-label": curve.title }) };
  });

  const redraw = () => {
    const frame = Number(slider.value);
    output.textContent = `step ${frame * data.stride} of ${(data.length - 1) * data.stride}`;
    scenes.forEach(scene => drawScene(scene, frame, extent, data));
    curves.forEach(curve => drawCurve(curve, frame, data.length));
  };
  let started = null;
  const rate = Math.max(20, data.length / 20); // frames a second: no episode takes longer than 20 s
  const tick = now => {
    if (started === null) return;
    const frame = Math.floor((now - started) / 1000 * rate);
    slider.value = Math.max(0, Math.min(frame, data.length - 1));
    redraw();
    if (frame >= data.length - 1) pause(); else requestAnimationFrame(tick);
  };
  const pause = () => { started = null; button.textContent = "Play"; };
  button.addEventListener("click", () => {
    if (started !== null) return pause();
    const from = Number(slider.value) >= data.length - 1 ? 0 : Number(slider.value);
    started = performance.now() - from * 1000 / rate;
    button.textContent = "Pause";
    requestAnimationFrame(tick);
  });
  slider.addEventListener("input", () => { pause(); redraw(); });
  return redraw;
}

function bounds(scenes) {
  const box = [Infinity, Infinity, -Infinity, -Infinity];
  for (const { frames } of scenes) for (const segments of frames) for (const [x0, y0, x1, y1, r] of segments) {
    box[0] = Math.min(box[0], x0 - r, x1 - r);
    box[1] = Math.min(box[1], y0 - r, y1 - r);
    box[2] = Math.max(box[2], x0 + r, x1 + r);
    box[3] = Math.max(box[3], y0 + r, y1 + r);
  }
  return box[0] < Infinity ? box : [-1, -1, 1, 1];
}

function brush(canvas) {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.lineCap = pen.lineJoin = "round";
  return { pen, width, height };
}

function drawScene({ canvas, state, frames, role }, frame, [left, low, right, high], { context, stride }) {
  const { pen, width, height } = brush(canvas), margin = 14;
  const scale = Math.min((width - 2 * margin) / Math.max(right - left, 1e-9), (height - 2 * margin) / Math.max(high - low, 1e-9));
  const px = x => width / 2 + (x - (left + right) / 2) * scale, py = y => height / 2 - (y - (low + high) / 2) * scale;
  const step = frame * stride, over = frame >= frames.length;
  state.textContent = over ? `ended at step ${(frames.length - 1) * stride}`
    : role === "real" ? "real, depth 0" : step < context ? "context: the model sees the step" : `imagined, depth ${step - context + 1}`;
  canvas.style.opacity = over ? 0.4 : 1;
  for (const [x0, y0, x1, y1, radius] of frames[over ? frames.length - 1 : frame]) {
    if ([x0, y0, x1, y1, radius].includes(null)) continue;
    const thick = Math.max(2, 2 * radius * scale);
    // a rim in the background's colour keeps overlapping parts apart
    for (const [ink, extra] of [[colour("tint"), 2], [colour(role), 0]]) {
      pen.strokeStyle = pen.fillStyle = ink;
      pen.lineWidth = thick + extra;
      pen.beginPath();
      if (x0 === x1 && y0 === y1) { // a line without length would draw nothing: it is a disc
        pen.arc(px(x0), py(y0), pen.lineWidth / 2, 0, 2 * Math.PI);
        pen.fill();
      } else {
        pen.moveTo(px(x0), py(y0));
        pen.lineTo(px(x1), py(y1));
        pen.stroke();
      }
    }
  }
}

function drawCurve({ canvas, lines }, frame, length) {
  const { pen, width, height } = brush(canvas), margin = 6;
  const seen = lines.flatMap(line => line.y).filter(y => y !== null);
  const low = seen.reduce((a, b) => Math.min(a, b), Infinity), high = seen.reduce((a, b) => Math.max(a, b), -Infinity);
  const gutter = 52, px = i => gutter + i / Math.max(length - 1, 1) * (width - gutter - margin);
  const py = y => high > low ? height - margin - (y - low) / (high - low) * (height - 2 * margin) : height / 2;
  const stroke = (y, to) => {
    pen.beginPath();
    let down = false;
    for (let i = 0; i < Math.min(y.length, to + 1); i++) {
      if (y[i] !== null) pen[down ? "lineTo" : "moveTo"](px(i), py(y[i]));
      down = y[i] !== null;
    }
    pen.stroke();
  };
  pen.fillStyle = colour("soft");
  pen.font = "11px sans-serif";
  pen.textAlign = "right";
  const label = y => String(Number(y.toPrecision(3))).replace("-", "\u2212");
  if (seen.length) pen.fillText(label(high), gutter - 8, high > low ? margin + 8 : height / 2 + 4);
  if (high > low) pen.fillText(label(low), gutter - 8, height - margin);
  pen.strokeStyle = colour("line");
  pen.strokeRect(px(frame), 0, 0, height);
  for (const { role, y } of lines) {
    pen.strokeStyle = pen.fillStyle = colour(role);
    pen.setLineDash(role === "imagined" ? [5, 4] : []);
    pen.lineWidth = 1.8;
    pen.globalAlpha = 0.3;
    stroke(y, y.length);
    pen.globalAlpha = 1;
    stroke(y, frame);
    if (y[frame] != null) {
      pen.beginPath();
      pen.arc(px(frame), py(y[frame]), 3.5, 0, 7);
      pen.fill();
    }
  }
}

// The reader's setting, the paper and the window change what is drawn
const paper = on => () => {
  root.classList.toggle("print", on);
  if (on) document.querySelectorAll("details").forEach(details => { details.open = true; });
  draw();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("beforeprint", paper(true));
addEventListener("afterprint", paper(false));
draw();
const redraws = new Map([...plots.map(plot => [plot.element, () => drawPlot(plot)]), ...films.map(film => [film.element, film.redraw])]);
const widths = new Map([...redraws.keys()].map(element => [element, element.clientWidth]));
const sizes = new ResizeObserver(entries => requestAnimationFrame(() => {
  for (const { target } of entries) {
    if (widths.get(target) === target.clientWidth) continue;
    widths.set(target, target.clientWidth);
    redraws.get(target)();
  }
}));
for (const element of redraws.keys()) sizes.observe(element);
