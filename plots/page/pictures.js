// Pictures that can be moved. The function `clip` fills each <div class="moving"
// data-picture="clip">, and so on. The data of two of them, in #recorded, are of plots/record.py.
window.pictures = (() => {
// ------------------------------------------------------------------------------ Mathematics

// One sample's term of Eq. 7, and its slope in r; at a corner the one that PyTorch takes.
function clipTerm(r, advantage, eps) {
  const [low, high] = [1 - eps, 1 + eps].map(x => +x.toFixed(9));
  const clipped = Math.min(Math.max(r, low), high), flat = advantage > 0 ? r > high : r < low;
  const l = Math.min(r * advantage, clipped * advantage);
  return { low, high, l, slope: flat ? 0 : advantage };
}

// The weights of δ_t, δ_{t+1}, ... in Eq. 11, their sum, and how many make half of it.
function gaeWeights(gamma, lambda, count) {
  const decay = gamma * lambda;
  const half = Math.max(1, Math.ceil(Math.log(2) / Math.log(1 / decay) - 1e-9));
  return { weights: range(count, k => decay ** k), sum: 1 / (1 - decay), half };
}

// TRPO on a policy π(right | s) = σ(θ·x) and its samples [x1, x2, action, Â].
function twoWeights({ theta, samples }) {
  const logit = (x, theta) => theta[0] * x[0] + theta[1] * x[1];
  const old = samples.map(x => logit(x, theta)), p = old.map(z => 1 / (1 + Math.exp(-z)));
  const mean = f => samples.reduce((sum, x, i) => sum + f(x, i), 0) / samples.length;
  const fisherTerm = (j, k) => mean((x, i) => p[i] * (1 - p[i]) * x[j] * x[k]);
  const g = [0, 1].map(j => mean((x, i) => (x[2] - p[i]) * x[3] * x[j]));
  const [a, b, d] = [fisherTerm(0, 0), fisherTerm(0, 1), fisherTerm(1, 1)];
  const quadratic = ([x, y]) => (a * x * x + 2 * b * x * y + d * y * y) / 2;  // ½ xᵀ A x

  function after(step) {  // the change of the surrogate L, and KL(π_θold ‖ π_θ)
    let gain = 0, kl = 0;
    for (let i = 0; i < samples.length; i++) {
      const x = samples[i], shift = logit(x, step), e = Math.exp(old[i] + shift);
      gain += ((x[2] ? e / p[i] : 1 / (1 - p[i])) / (1 + e) - 1) * x[3];
      kl += Math.log((1 + e) * (1 - p[i])) - p[i] * shift;
    }
    return { gain: gain / samples.length, kl: kl / samples.length };
  }

  function attempt(delta, damping, k) {  // try k of the line search of trpo_continuous.py
    const [m, n] = [a + damping, d + damping], det = m * n - b * b;
    const s = [(n * g[0] - b * g[1]) / det, (m * g[1] - b * g[0]) / det];  // (A + damping) s = g
    const beta = Math.sqrt(2 * delta / (s[0] * g[0] + s[1] * g[1])), natural = s.map(x => beta * x);
    const alpha = 0.8 ** k, step = natural.map(x => alpha * x), { gain, kl } = after(step);
    const gradient = g.map(x => x * Math.sqrt(delta / quadratic(g)));  // KL δ by the same model
    return { natural, gradient, alpha, step, gain, kl, accepted: gain > 0 && kl <= delta };
  }
  return { g, fisher: [[a, b], [b, d]], quadratic, after, attempt };
}

// Marching squares: pairs of points between which a grid of values crosses a level.
function contour(grid, level) {
  const points = [];
  grid.slice(1).forEach((_, i) => grid[i].slice(1).forEach((_, j) => {
    const corners = [[i, j], [i + 1, j], [i + 1, j + 1], [i, j + 1]];
    corners.forEach(([x, y], k) => {
      const [u, v] = corners[(k + 1) % 4], from = grid[x][y] - level, to = grid[u][v] - level;
      const t = from / (from - to);
      if ((from < 0) !== (to < 0)) points.push([x + t * (u - x), y + t * (v - y)]);
    });
  }));
  return points;
}

// ---------------------------------------------------------------------------------- Drawing

const minus = x => String(x).replace("-", "−");
const fixed = (x, digits = 2) => minus((+x.toFixed(digits)).toFixed(digits));
const short = x => minus(+x.toPrecision(3));
const range = (count, f) => Array.from({ length: count }, (_, k) => f(k));

function ticks(low, high, count) {  // at most about so many round numbers
  const power = 10 ** Math.floor(Math.log10((high - low) / count));
  const step = [1, 2, 5, 10].map(x => x * power).find(x => (high - low) / x <= count);
  const first = Math.ceil(low / step), last = Math.floor(high / step);
  return range(last - first + 1, k => +((first + k) * step).toPrecision(9));
}

function path(points, css, every = Infinity) {  // one line, or one for every so many points
  const part = ([x, y], k) => `${k % every ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
  return `<path class="${css}" d="${points.map(part).join("")}"/>`;
}

const line = (x1, y1, x2, y2, css) => path([[x1, y1], [x2, y2]], css);
const rect = (x, y, width, height, css) =>
  `<rect class="${css}" x="${x}" y="${y}" width="${width}" height="${height}"/>`;
const dot = (x, y, open) => `<circle class="${open ? "open" : ""}" cx="${x}" cy="${y}" r="5"/>`;

function text(x, y, words, css = "") {  // what follows ^ or _ stands higher or lower
  const shifted = words.replace(/([_^])(\S+)/, (all, sign, part) =>
    `<tspan dy="${sign === "^" ? -5 : 4}">${part}</tspan>`);
  return `<text class="${css}" x="${x}" y="${y}">${shifted}</text>`;
}

function arrow([x1, y1], [x2, y2], css) {
  const length = Math.hypot(x2 - x1, y2 - y1), [u, v] = [(x2 - x1) / length, (y2 - y1) / length];
  const at = (back, side) => [x2 - back * u + side * v, y2 - back * v - side * u];
  return path([[x1, y1], at(6, 0)], css) + path([[x2, y2], at(9, 4), at(9, -4)], `head ${css}`);
}

// Axes in a box of the picture. X and Y: from numbers to places.
function axes([x0, x1], [y0, y1], [left, right, top, bottom]) {
  const X = x => left + (x - x0) / (x1 - x0) * (right - left);
  const Y = y => bottom - (y - y0) / (y1 - y0) * (bottom - top);
  const draw = (xs, ys) => path([[left, top], [left, bottom], [right, bottom]], "rule")
    + xs.map(x => text(X(x), bottom + 16, minus(x), "soft middle")).join("")
    + ys.map(y => text(left - 6, Y(y) + 4, minus(y), "soft end")).join("");
  const upright = x => line(X(x), top, X(x), bottom, "soft dash thin");
  const epsilon = eps => upright(1 - eps) + text(X(1 - eps) - 4, top + 10, "1 − ε", "soft end")
    + upright(1 + eps) + text(X(1 + eps) + 4, top + 10, "1 + ε", "soft");
  return { X, Y, draw, upright, epsilon, left, right, top, bottom };
}

// Fill a div: an SVG, sliders, a sentence and a note. knobs: {name: [label, min, max, step, value,
// how to show it]}; draw(values) returns the SVG's inside and the sentence.
function picture(div, height, knobs, note, draw) {
  const sliders = Object.entries(knobs).map(([name, [label, min, max, step, value]]) =>
    `<label><span>${label}</span><input type="range" name="${name}" min="${min}" max="${max}"
      step="${step}" value="${value}"><output></output></label>`);
  div.innerHTML = `<svg viewBox="0 0 360 ${height}" role="img"><g></g></svg><div class="knobs">
    ${sliders.join("")}</div><p class="says" aria-live="polite"></p><p class="note">${note}</p>`;
  const [svg, panel, says] = div.children, values = {};
  function redraw() {
    for (const input of panel.querySelectorAll("input")) {
      const shown = knobs[input.name][5](values[input.name] = +input.value);
      input.nextElementSibling.textContent = shown;
      input.setAttribute("aria-valuetext", shown);
    }
    [svg.firstChild.innerHTML, says.innerHTML] = draw(values).map(x => x.replace(/\s+/g, " "));
    svg.setAttribute("aria-label", says.textContent);
  }
  function set(name, value) {
    panel.querySelector(`[name=${name}]`).value = value;
    redraw();
  }
  panel.addEventListener("input", redraw);
  let before;  // a finger that only scrolls the page must not move a slider
  panel.addEventListener("pointerdown", () => { before = { ...values }; });
  panel.addEventListener("pointercancel", ({ target: { name } }) => name && set(name, before[name]));
  redraw();
  return { svg, panel, values, set };
}

// A button that moves a slider from 0, a step at a time, until it is done.
function walk({ panel, values, set }, label, name, done) {
  panel.insertAdjacentHTML("beforeend", `<button type="button">${label}</button>`);
  let timer;
  const next = () => done() ? clearInterval(timer) : set(name, values[name] + 1);
  panel.addEventListener("input", () => clearInterval(timer));
  panel.lastChild.addEventListener("click", () => {
    clearInterval(timer);
    set(name, 0);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) while (!done()) next();
    else timer = setInterval(next, 800);
  });
}

// --------------------------------------------------------------------------------- Pictures

function clipSentence(r, advantage, eps) {
  const { low, high, slope } = clipTerm(r, advantage, eps), up = advantage > 0;
  const is = `r = ${fixed(r)} is`, sign = `Â ${up ? "&gt;" : "&lt;"} 0`;
  const pull = `The gradient is Â ∇r: the action becomes ${up ? "more" : "less"} probable.`;
  const outside = r > high ? `above 1 + ε = ${fixed(high)}` : `below 1 − ε = ${fixed(low)}`;
  if (!advantage) return "Â = 0: L is 0 for every r. This sample has no gradient.";
  if (!slope) return `${is} ${outside} and ${sign}: clipped, no gradient. This sample pushes no
    further.`;
  if (r > high || r < low) return `${is} ${outside}, but ${sign}: the minimum is r Â. ${pull}`;
  if (r === (up ? high : low)) return `${is} exactly 1 ${up ? "+" : "−"} ε, the corner of L.
    Beyond it there is no gradient; at it, PyTorch takes Â ∇r.`;
  return `${is} within 1 ± ε: L = r Â. ${pull}`;
}

function clip(div) {
  const plot = axes([0, 2], [-4, 4], [30, 350, 14, 234]), { X, Y } = plot;
  const knobs = { eps: ["ε", 0.05, 0.5, 0.01, 0.2, fixed],
                  advantage: ["Â, advantage", -2, 2, 0.1, 1, x => fixed(x, 1)],
                  r: ["r, ratio", 0.05, 2, 0.01, 1.31, fixed] };
  const note = `Figure 1 of the PPO paper, for one sample: its term L of L<sup>CLIP</sup> (Eq. 7)
    against the ratio r. Dashed: r Â, without clipping. The arrow: where gradient ascent moves r.
    The dot can be dragged.`;
  const { svg, set } = picture(div, 258, knobs, note, ({ eps, advantage, r }) => {
    const { low, high, l, slope } = clipTerm(r, advantage, eps), up = advantage > 0;
    const [from, to] = up ? [X(high), X(2)] : [X(0), X(low)];  // where L is flat
    const [x, side] = up ? [X(1.98), "end"] : [X(0.02), ""];
    const names = rect(from, 14, to - from, 220, "shade")
      + text((from + to) / 2, up ? 196 : 60, "no gradient", "soft middle")
      + text(x, Y(up ? 2 * advantage : 0) - 8, "r Â", `orange ${side}`)
      + text(x, Y((up ? high : low) * advantage) + 17, "L", `blue ${side}`);
    const term = x => [X(x), Y(clipTerm(x, advantage, eps).l)];
    const push = X(r) + 20 * slope + 12 * Math.sign(slope);
    const drawing = plot.draw([0, 0.5, 1, 1.5, 2], [-4, -2, 0, 2, 4]) + (advantage ? names : "")
      + line(30, Y(0), 350, Y(0), "rule") + text(346, 228, "r", "soft end") + plot.epsilon(eps)
      + line(X(0), Y(0), X(2), Y(2 * advantage), "orange dash")
      + path([0, low, high, 2].map(term), "blue bold") + line(X(r), Y(l), X(r), Y(0), "soft thin")
      + (slope ? arrow([X(r), Y(0)], [push, Y(0)], "ink bold") : "") + dot(X(r), Y(l), !slope);
    div.style = `--x: ${X(r)}px; --y: ${Y(l)}px`;  // where the handle is
    return [drawing, clipSentence(r, advantage, eps)];
  });
  svg.insertAdjacentHTML("beforeend", '<circle class="handle" r="18"/>');
  const handle = svg.lastChild;
  handle.addEventListener("touchstart", event => event.preventDefault(), { passive: false });
  handle.addEventListener("pointerdown", event => handle.setPointerCapture(event.pointerId));
  handle.addEventListener("pointermove", event => {
    const { x } = new DOMPoint(event.x, event.y).matrixTransform(svg.getScreenCTM().inverse());
    if (handle.hasPointerCapture(event.pointerId)) set("r", (x - X(0)) / (X(1) - X(0)));
  });
}

function gae(div) {
  const plot = axes([-0.5, 50.5], [0, 1], [34, 354, 24, 160]), { X, Y, upright } = plot;
  const knobs = { lambda: ["λ of GAE", 0, 1, 0.01, 0.95, fixed],
                  gamma: ["γ, discount", 0.9, 1, 0.001, 0.99, x => fixed(x, 3)] };
  const note = `Eq. 11: Â<sub>t</sub> = δ<sub>t</sub> + γλ δ<sub>t+1</sub> + (γλ)<sup>2</sup>
    δ<sub>t+2</sub> + … A bar is the weight of δ<sub>t+k</sub>. Dark: the first half or more of the weight.`;
  picture(div, 196, knobs, note, ({ gamma, lambda }) => {
    const { weights, sum, half } = gaeWeights(gamma, lambda, 51);
    const bar = (w, k) => rect(X(k) - 2.4, Y(w), 4.8, 160 - Y(w), k < half ? "blue" : "pale");
    const drawing = weights.map(bar).join("") + plot.draw([0, 10, 20, 30, 40, 50], [0, 0.5, 1])
      + text(354, 192, "k, steps ahead", "soft end") + text(34, 14, "weight (γλ)^k", "blue")
      + (half < 50 ? upright(half - 0.5) : "");
    const steps = half === 1 ? "step" : `${half} steps`, more = half > 51 ? ", more than shown" : "";
    const size = sum === Infinity ? "Every δ up to the rollout's end has the weight 1."
      : `Without an end the weights add up to 1 / (1 − γλ) = ${fixed(sum, 1)}; at least half
        of the weight lies within the next ${steps}${more}.`;
    const end = { 0: `λ = 0: Â<sub>t</sub> = δ<sub>t</sub>, the one-step error: least variance, most
                    bias.`,
                  1: `λ = 1: Eq. 10, the discounted rewards that followed, and V at the rollout's
                    end, minus V: most variance, least bias.` };
    return [drawing, `${size} ${end[lambda] ?? ""}`];
  });
}

function trust(div, { trust: data }) {
  const { theta } = data, model = twoWeights(data), [[a, b], [, d]] = model.fisher, n = 60;
  function background(delta) {  // axes and contours: what depends on δ only
    const half = 1.45 * Math.sqrt(2 * delta * Math.max(a, d) / (a * d - b * b));  // 1.45 ellipses
    const [xs, ys] = theta.map(t => [t - half, t + half]);
    const plot = axes(xs, ys, [54, 350, 10, 306]), { X, Y } = plot;
    const at = (i, low) => low + 2 * half * i / (n - 1);
    const place = ([i, j]) => [X(at(i, xs[0])), Y(at(j, ys[0]))];
    const grid = range(n, i => range(n, j => model.after([at(i, -half), at(j, -half)])));
    const [gains, kls] = ["gain", "kl"].map(key => grid.map(row => row.map(cell => cell[key])));
    const levels = ticks(Math.min(...gains.flat()), Math.max(...gains.flat()), 9).map(level => {
      const points = contour(gains, level).map(place);
      const words = `${level > 0 ? "+" : ""}${minus(level)}`;
      const end = points.find(([x, y]) => x > 349.9 && y > 24 && y < 300 || y < 10.1 && x > 60);
      return path(points, level ? "rule" : "soft thin", 2)
        + (end ? text(Math.min(end[0], 334), Math.max(end[1] + 4, 22), words, "soft middle") : "");
    });
    const rings = [0.25, 1, 2.25].map(f => contour(kls, f * delta).map(place));
    const [x, y] = rings[1].reduce((p, q) => q[1] > p[1] && q[0] < 260 ? q : p);
    return { X, Y, drawing: plot.draw(ticks(...xs, 5), ticks(...ys, 5)) + levels.join("")
      + rings.map((ring, k) => path(ring, `blue ${k === 1 ? "bold" : "thin"}`, 2)).join("")
      + text(x, y + 16, "KL = δ", "blue middle") };
  }
  const knobs = { power: ["δ, bound", -3, 0, 0.05, -1, x => (10 ** x).toPrecision(2)],
                  damping: ["damping", 0, 0.2, 0.005, 0, x => fixed(x, 3)],
                  k: ["fraction", 0, 9, 1, 0, k => fixed(0.8 ** k, 3)] };
  const note = `A policy with two weights on CartPole: π(right | s) = σ(θ<sub>1</sub> angle +
    θ<sub>2</sub> velocity), both normalised; θ<sub>2</sub> has the wrong sign. Blue: KL of ¼ δ, δ
    (bold), 2¼ δ; dashed: δ by the quadratic model. Grey: change of L on 300 samples, Â by the
    script's GAE and critic. It zooms with δ. Damping shortens the natural step and turns it towards
    the gradient; trpo_continuous.py has damping 0.1 and δ = 0.01.`;
  let drawn, back, tried;
  const made = picture(div, 342, knobs, note, ({ power, damping, k }) => {
    const delta = 10 ** power;
    if (delta !== drawn) [drawn, back] = [delta, background(delta)];
    tried = model.attempt(delta, damping, k);
    const { natural, gradient, alpha, step, gain, kl, accepted } = tried;
    const place = ([x, y]) => [back.X(theta[0] + x), back.Y(theta[1] + y)];
    const [origin, tip, other] = [[0, 0], natural, gradient].map(place);
    const ellipse = range(145, i => {  // ½ xᵀ A x = δ
      const way = [Math.cos, Math.sin].map(f => f(i * Math.PI / 72));
      return place(way.map(x => x * Math.sqrt(delta / model.quadratic(way))));
    });
    const name = ([x, y], right, words, css) => text(x + (right ? 8 : -8), y - 8, words,
                                                     `${css} ${right ? "" : "end"}`);
    const plain = model.after(gradient);
    const drawing = back.drawing + path(ellipse, "blue dash") + arrow(origin, other, "orange bold")
      + arrow(origin, tip, "ink bold") + name(other, other[0] > tip[0], "gradient step", "orange")
      + name(tip, other[0] < tip[0], "natural step", "") + dot(...origin)
      + text(origin[0] + 8, origin[1] + 16, "θ_old") + dot(...place(step), !accepted)
      + text(350, 338, "θ₁, weight of the angle", "soft end")
      + '<g transform="rotate(-90)">'
      + text(-10, 13, "θ₂, weight of the angular velocity", "soft end") + "</g>";
    const verdict = accepted ? "KL ≤ δ and L rises: <b>accepted</b>."
      : `${kl > delta ? "KL is above δ" : "L does not rise"}: <b>${k < 9 ? "shrink" : "keep θ<sub>old</sub>"}</b>.`;
    return [drawing, `Fraction ${fixed(alpha, 3)}: KL is ${short(kl)}, by the quadratic model
      ${short(model.quadratic(step))}. L changes by ${short(gain)}. ${verdict} The gradient step:
      KL ${short(plain.kl)}, L changes by ${short(plain.gain)}.`];
  });
  walk(made, "line search", "k", () => tried.accepted || made.values.k === 9);
}

function update(div, { update: { clip: clipped, none } }) {
  const last = clipped.length - 1, total = clipped[0][0].reduce((a, b) => a + b);
  const shares = row => row[0].map(count => count / total);
  const most = Math.max(...[...clipped.slice(1), ...none.slice(1)].flatMap(shares));
  const plot = axes([0, 92 / 45], [0, most], [34, 354, 16, 160]), { X } = plot;
  const Y = share => plot.Y(Math.min(share, most)), edge = k => X(2 * k / 45);
  const knobs = { epoch: ["epochs", 0, last, 1, last, String] };
  const note = `A first update of ppo_continuous.py on HalfCheetah: all ${total} ratios, ε = 0.2.
    The same rollout also without clipping (Eq. 6). L<sup>CLIP</sup> is measured for both.`;
  const made = picture(div, 298, knobs, note, ({ epoch }) => {
    const [bars, others] = [clipped, none].map(rows => shares(rows[epoch]));
    const outline = others.flatMap((share, k) => [k, k + 1].map(e => [edge(e), Y(share)]));
    const small = k => {
      const column = rows => rows.map(row => row[k + 1]), all = [clipped, none].flatMap(column);
      const part = axes([0, last], [Math.min(0, ...all), Math.max(...all)],
                        [34 + 112 * k, 130 + 112 * k, 226, 270]);
      const curve = (rows, css) => path(column(rows).map((y, x) => [part.X(x), part.Y(y)]), css);
      return text(part.left, 218, ["L^CLIP", "KL", "clip fraction"][k]) + part.upright(epoch)
        + line(part.left, part.Y(0), part.right, part.Y(0), "rule")
        + curve(none, "orange") + curve(clipped, "blue bold")
        + text(part.left, 289, fixed(clipped[epoch][k + 1], 3), "blue")
        + text(part.right, 289, fixed(none[epoch][k + 1], 3), "orange end");
    };
    const bar = (share, k) => rect(edge(k) + 0.3, Y(share), 6.3, 160 - Y(share), "pale");
    const drawing = bars.map(bar).join("") + plot.epsilon(0.2) + path(outline, "orange bold")
      + plot.draw([0, 0.5, 1, 1.5], ticks(0, most, 4)) + text(354, 176, "&gt; 2", "soft end")
      + text(34, 10, "share of the samples", "soft") + text(354, 191, "ratio r", "soft end")
      + text(354, 42, "bars: with clipping", "blue end") + text(354, 58, "outline: without", "orange end")
      + text(X(1), 10, epoch ? "" : "↑ all", "middle") + range(3, small).join("");
    return [drawing, epoch === 0 ? "Epoch 0: θ = θ<sub>old</sub>, and all ratios are exactly 1."
      : `After epoch ${epoch} of ${last}: with clipping ${fixed(100 * clipped[epoch][3], 1)}% of
        the ratios lie outside 1 ± ε, without it ${fixed(100 * none[epoch][3], 1)}%.`];
  });
  walk(made, "play", "epoch", () => made.values.epoch === last);
}

const draw = { clip, gae, trust, update };
const recorded = JSON.parse(document.getElementById("recorded")?.textContent ?? "null");
for (const div of document.querySelectorAll(".moving")) draw[div.dataset.picture](div, recorded);
return { clipTerm, gaeWeights, twoWeights };
})();
