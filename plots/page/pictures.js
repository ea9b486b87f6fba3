// Pictures that can be moved. Each <div class="moving" data-picture="clip"> is filled by the
// function of that name. The data of two of them are those of plots/record.py, in #recorded.
window.pictures = (() => {
"use strict";

// ------------------------------------------------------------------------------ Mathematics

// One sample's term of Eq. 7, and its slope in r; at a corner the one that PyTorch takes.
function clipTerm(r, advantage, eps) {
  const clipped = Math.min(Math.max(r, 1 - eps), 1 + eps);
  const flat = advantage > 0 ? r > 1 + eps : r < 1 - eps;
  return { l: Math.min(r * advantage, clipped * advantage), slope: flat ? 0 : advantage };
}

// The weights of δ_t, δ_{t+1}, ... in Eq. 11, their sum, and how many make half of it.
function gaeWeights(gamma, lambda, count) {
  const decay = gamma * lambda;
  return {
    weights: Array.from({ length: count }, (_, k) => decay ** k),
    sum: 1 / (1 - decay),
    half: decay === 0 ? 1 : Math.ceil(Math.log(0.5) / Math.log(decay) - 1e-9),
  };
}

// A policy π(right | s) = σ(θ·x) and its samples [x1, x2, action, Â]: L, KL, g, A of TRPO.
function twoWeights({ theta, samples }) {
  const logit = (x, [a, b]) => a * x[0] + b * x[1], sigmoid = z => 1 / (1 + Math.exp(-z));
  const old = samples.map(x => logit(x, theta)), p = old.map(sigmoid);
  const rest = old.map(z => Math.log1p(Math.exp(z)));
  const mean = f => samples.reduce((sum, x, i) => sum + f(x, i), 0) / samples.length;
  const fisherTerm = (j, k) => mean((x, i) => p[i] * (1 - p[i]) * x[j] * x[k]);
  const g = [0, 1].map(j => mean((x, i) => (x[2] - p[i]) * x[3] * x[j]));
  const [a, b, d] = [fisherTerm(0, 0), fisherTerm(0, 1), fisherTerm(1, 1)];

  function measure(at) {  // the surrogate L and KL(π_θold ‖ π_θ), means over the samples
    let l = 0, kl = 0;
    for (let i = 0; i < samples.length; i++) {
      const x = samples[i], z = logit(x, at), e = Math.exp(z), q = e / (1 + e);
      l += x[3] * (x[2] ? q / p[i] : (1 - q) / (1 - p[i]));
      kl += p[i] * (old[i] - z) + Math.log1p(e) - rest[i];
    }
    return { l: l / samples.length, kl: kl / samples.length };
  }
  const quadratic = ([x, y]) => (a * x * x + 2 * b * x * y + d * y * y) / 2;  // ½ xᵀ A x
  const lOld = measure(theta).l;
  const after = step => {
    const { l, kl } = measure([theta[0] + step[0], theta[1] + step[1]]);
    return { gain: l - lOld, kl };
  };
  function steps(delta, damping) {  // β s of App. C, and a gradient step of the model's KL δ
    const [m, n] = [a + damping, d + damping], det = m * n - b * b;
    const s = [(n * g[0] - b * g[1]) / det, (m * g[1] - b * g[0]) / det];  // (A + damping) s = g
    const beta = Math.sqrt(2 * delta / (s[0] * g[0] + s[1] * g[1]));
    const length = Math.sqrt(delta / quadratic(g));
    return { natural: s.map(x => beta * x), gradient: g.map(x => length * x) };
  }
  function tries(delta, damping) {  // trpo_continuous.py's line_search: up to ten, factor 0.8
    const { natural } = steps(delta, damping), found = [];
    for (let k = 0; k < 10 && !found.at(-1)?.accepted; k++) {
      const alpha = 0.8 ** k, { gain, kl } = after(natural.map(x => alpha * x));
      found.push({ alpha, gain, kl, accepted: gain > 0 && kl <= delta });
    }
    return found;
  }
  const reach = [d, a].map(x => Math.sqrt(2 * x / (a * d - b * b)));  // of the ellipse of KL 1
  return { theta, g, fisher: [[a, b], [b, d]], reach, measure, after, quadratic, steps, tries };
}

// Marching squares: pairs of points between which a grid of values crosses a level.
function contour(grid, level) {
  const points = [];
  for (let i = 0; i + 1 < grid.length; i++) {
    for (let j = 0; j + 1 < grid.length; j++) {
      const corners = [[i, j], [i + 1, j], [i + 1, j + 1], [i, j + 1]];
      corners.forEach(([x, y], k) => {
        const [u, v] = corners[(k + 1) % 4], from = grid[x][y] - level, to = grid[u][v] - level;
        const t = from / (from - to);
        if (from < 0 !== to < 0) points.push([x + t * (u - x), y + t * (v - y)]);
      });
    }
  }
  return points;
}

// ---------------------------------------------------------------------------------- Drawing

const fixed = (x, digits = 2) => (+x.toFixed(digits)).toFixed(digits).replace("-", "−");
const percent = x => `${fixed(100 * x, x > 0 && x < 0.01 ? 1 : 0)} %`;
const range = (count, f) => Array.from({ length: count }, (_, k) => f(k));

function ticks(low, high, count) {  // round numbers, about so many
  const power = 10 ** Math.floor(Math.log10((high - low) / count));
  const step = [1, 2, 5, 10].map(x => x * power).find(x => (high - low) / x <= count);
  const first = Math.ceil(low / step - 1e-9);
  return range(Math.floor(high / step + 1e-9) - first + 1, k => +((first + k) * step).toPrecision(9));
}

const line = (x1, y1, x2, y2, css) => `<path class="${css}" d="M${x1} ${y1}L${x2} ${y2}"/>`;
const curve = (points, css) => `<path class="${css}" d="M${points.map(
  ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}"/>`;
const pairs = (points, css) => `<path class="${css}" d="${points.map(
  ([x, y], k) => `${k % 2 ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("")}"/>`;
const rect = (x, y, width, height, css) =>
  `<rect class="${css}" x="${x}" y="${y}" width="${width}" height="${height}"/>`;
const dot = (x, y, css = "") => `<circle class="${css}" cx="${x}" cy="${y}" r="5"/>`;
const text = (x, y, words, css = "") =>  // L^CLIP: what follows ^ stands higher
  `<text class="${css}" x="${x}" y="${y}">${words.replace(/\^(\S+)/, '<tspan dy="-5">$1</tspan>')}</text>`;

function arrow(x1, y1, x2, y2, css) {
  const length = Math.hypot(x2 - x1, y2 - y1), [u, v] = [(x2 - x1) / length, (y2 - y1) / length];
  const side = s => `L${x2 - 9 * u + 4 * s * v} ${y2 - 9 * v - 4 * s * u}`;
  return line(x1, y1, x2 - 6 * u, y2 - 6 * v, css)
    + `<path class="head ${css.replace("dash", "")}" d="M${x2} ${y2}${side(1)}${side(-1)}Z"/>`;
}

// Axes in a box of the picture. X and Y: from numbers to places.
function axes([x0, x1], [y0, y1], [left, right, top, bottom]) {
  const X = x => left + (x - x0) / (x1 - x0) * (right - left);
  const Y = y => bottom - (y - y0) / (y1 - y0) * (bottom - top);
  const draw = (xs, ys, show = String) => line(left, bottom, right, bottom, "rule")
    + line(left, top, left, bottom, "rule")
    + xs.map(x => text(X(x), bottom + 16, show(x), "soft middle")).join("")
    + ys.map(y => text(left - 6, Y(y) + 4, show(y), "soft end")).join("");
  return { X, Y, draw, left, right, top, bottom };
}

// Fill a div: an SVG, sliders, a sentence and a note. knobs: {name: [label, min, max, step, value,
// how to show it]}; draw(values) returns the SVG's inside and the sentence.
function picture(div, height, knobs, note, draw) {
  div.innerHTML = `<svg viewBox="0 0 360 ${height}" role="img"><g></g></svg><div class="knobs"></div>
<p class="says" aria-live="polite"></p><p class="note">${note}</p>`;
  const [svg, panel, says] = div.children, inputs = {}, values = {};
  function redraw() {
    for (const [name, input] of Object.entries(inputs)) {
      values[name] = +input.value;
      const shown = knobs[name][5](values[name]);
      input.nextElementSibling.textContent = shown;
      input.setAttribute("aria-valuetext", shown);
    }
    [svg.firstChild.innerHTML, says.innerHTML] = draw(values);
    svg.setAttribute("aria-label", says.textContent);
  }
  for (const [name, [label, min, max, step, value]] of Object.entries(knobs)) {
    panel.insertAdjacentHTML("beforeend", `<label><span>${label}</span><input type="range"
name="${name}" min="${min}" max="${max}" step="${step}" value="${value}"><output></output></label>`);
    inputs[name] = panel.lastChild.children[1];
    inputs[name].addEventListener("input", redraw);
  }
  const set = (name, value) => {
    inputs[name].value = value;
    redraw();
  };
  redraw();
  return { svg, panel, values, set };
}

// A button that calls first(), then next() until that is false: at once, or one call a while.
function walk(panel, label, first, next) {
  const button = panel.appendChild(document.createElement("button"));
  let timer = 0;
  button.type = "button";
  button.textContent = label;
  button.addEventListener("click", () => {
    clearInterval(timer);
    first();
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) while (next());
    else timer = setInterval(() => next() || clearInterval(timer), 800);
  });
}

// --------------------------------------------------------------------------------- Pictures

function clip(div) {
  let handle;
  const plot = axes([0, 2], [-4, 4], [30, 350, 14, 234]), { X, Y } = plot;
  const knobs = { eps: ["ε, how far", 0.05, 0.5, 0.01, 0.2, fixed],
                  advantage: ["Â, the advantage", -2, 2, 0.1, 1, x => fixed(x, 1)],
                  r: ["r, the ratio", 0, 2, 0.01, 1.31, x => fixed(x)] };
  knobs.eps[5] = x => fixed(x);
  const note = "Figure 1 of the PPO paper for one sample: its term of L<sup>CLIP</sup> (Eq. 7) "
    + "against the ratio r = π<sub>θ</sub>(a|s) / π<sub>θold</sub>(a|s). The arrow: where gradient "
    + "ascent moves r. The dot can be dragged, too.";
  const made = picture(div, 258, knobs, note, ({ eps, advantage, r }) => {
    const { l, slope } = clipTerm(r, advantage, eps), up = advantage > 0;
    const [low, high] = [1 - eps, 1 + eps].map(x => +x.toFixed(2));
    const term = x => [X(x), Y(clipTerm(x, advantage, eps).l)];
    const [from, to] = up ? [high, 2] : [0, low], end = up ? [X(1.98), "end"] : [X(0.02), ""];
    const shaded = advantage === 0 ? "" : rect(X(from), 14, X(to) - X(from), 220, "shade")
      + text((X(from) + X(to)) / 2, up ? 196 : 60, "no gradient", "soft middle")
      + text(end[0], Y(up ? 2 * advantage : 0) - 8, "r Â", `orange ${end[1]}`)
      + text(end[0], Y((up ? high : low) * advantage) + 17, "L", `blue ${end[1]}`);
    const push = slope && arrow(X(r), Y(0), X(r) + slope * 20 + Math.sign(slope) * 12, Y(0), "ink bold");
    handle?.setAttribute("cx", X(r));
    handle?.setAttribute("cy", Y(l));
    const drawing = plot.draw([0, 0.5, 1, 1.5, 2], [-4, -2, 0, 2, 4], x => fixed(x, x % 1 ? 1 : 0))
      + shaded + line(30, Y(0), 350, Y(0), "rule") + text(350, 228, "r", "soft end")
      + line(X(low), 14, X(low), 234, "soft dash thin") + line(X(high), 14, X(high), 234, "soft dash thin")
      + text(X(low) - 4, 24, "1 − ε", "soft end") + text(X(high) + 4, 24, "1 + ε", "soft")
      + curve([[X(0), Y(0)], [X(2), Y(2 * advantage)]], "orange dash")
      + curve([0, low, high, 2].map(term), "blue bold")
      + line(X(r), Y(l), X(r), Y(0), "soft thin") + (push || "") + dot(X(r), Y(l), slope ? "" : "open");
    const at = `r = ${fixed(r)}`, sign = up ? "Â &gt; 0" : "Â &lt; 0";
    const above = `above 1 + ε = ${fixed(high)}`, below = `below 1 − ε = ${fixed(low)}`;
    const pull = `The gradient is Â ∇r: it makes the action ${up ? "more" : "less"} probable.`;
    if (advantage === 0) return [drawing, `Â = 0: L is 0 for every r. This sample has no gradient.`];
    if (r === high || r === low) {
      const corner = up === (r === high);
      return [drawing, `${at} is exactly 1 ${r === high ? "+" : "−"} ε. ` + (corner
        ? `L has its corner here: on one side its slope is Â, on the other 0. PyTorch takes Â.`
        : `L = r Â. ${pull}`)];
    }
    if (!slope) return [drawing, `${at} is ${up ? above : below} and ${sign}: clipped, no gradient. `
      + `This sample pushes no further.`];
    if (r > low && r < high) return [drawing, `${at} lies within 1 ± ε: L = r Â. ${pull}`];
    return [drawing, `${at} is ${r > high ? above : below}, but ${sign}: the minimum is r Â. ${pull} `
      + `r moves back towards 1.`];
  });
  made.svg.insertAdjacentHTML("beforeend", '<circle class="handle" r="18"/>');
  handle = made.svg.lastChild;
  made.set("r", made.values.r);
  const move = event => made.svg.hasPointerCapture(event.pointerId) && made.set("r", 2 * (
    new DOMPoint(event.clientX, event.clientY).matrixTransform(made.svg.getScreenCTM().inverse()).x
    - plot.left) / (plot.right - plot.left));
  handle.addEventListener("pointerdown", event => made.svg.setPointerCapture(event.pointerId));
  made.svg.addEventListener("pointermove", move);
}

function gae(div) {
  const plot = axes([-0.5, 50.5], [0, 1], [34, 354, 12, 160]), { X, Y } = plot;
  const knobs = { lambda: ["λ of GAE", 0, 1, 0.01, 0.95, x => fixed(x)],
                  gamma: ["γ, the discount", 0.9, 1, 0.001, 0.99, x => fixed(x, 3)] };
  const note = "Eq. 11: Â<sub>t</sub> = δ<sub>t</sub> + γλ δ<sub>t+1</sub> + (γλ)<sup>2</sup> "
    + "δ<sub>t+2</sub> + … A bar is the weight (γλ)<sup>k</sup> of δ<sub>t+k</sub>, the error of V "
    + "after step k. Dark: the first half of the weight.";
  picture(div, 196, knobs, note, ({ gamma, lambda }) => {
    const { weights, sum, half } = gaeWeights(gamma, lambda, 51), endless = sum === Infinity;
    const bars = weights.map((w, k) => rect(X(k - 0.38), Y(w), X(0.76) - X(0), 160 - Y(w),
                                            k < half ? "blue" : "pale")).join("");
    const drawing = bars + plot.draw([0, 10, 20, 30, 40, 50], [0, 0.5, 1])
      + text(354, 192, "k, steps ahead", "soft end") + text(44, 22, "(γλ)^k", "blue")
      + (half < 50 ? line(X(half - 0.5), 12, X(half - 0.5), 160, "soft dash thin")
         + text(X(half - 0.5) + 5, 44, "half of the weight", "soft") : "");
    const steps = half === 1 ? "the next step" : `the next ${half} steps`;
    const size = endless ? "Every δ has the weight 1: the sum has no bound but the rollout's end."
      : `The weights add up to 1 / (1 − γλ) = ${fixed(sum, 1)}; half of the weight lies within ${steps}.`;
    const end = lambda === 0 ? " λ = 0: Â<sub>t</sub> = δ<sub>t</sub>, the one-step error. It trusts V: "
      + "all bias, little variance."
      : lambda === 1 ? " λ = 1: Eq. 10, the rewards that followed minus V. All variance, no bias by V."
      : ` Beyond k = 50: ${percent((gamma * lambda) ** 51)}.`;
    return [drawing, size + end];
  });
}

function trust(div, { trust: data }) {
  const model = twoWeights(data), { theta } = model, n = 56;
  let zoom = 0, background;
  function contours(delta) {  // what depends on δ only
    const half = 1.45 * Math.max(...model.reach) * Math.sqrt(delta);
    const [xs, ys] = theta.map(t => [t - half, t + half]);
    const plot = axes(xs, ys, [46, 350, 10, 314]), { X, Y } = plot;
    const at = ([i, j]) => [xs[0] + 2 * half * i / (n - 1), ys[0] + 2 * half * j / (n - 1)];
    const grid = range(n, i => range(n, j => model.measure(at([i, j]))));
    const [ls, kls] = ["l", "kl"].map(key => grid.map(row => row.map(cell => cell[key])));
    const lOld = model.measure(theta).l, gains = ls.map(row => row.map(l => l - lOld));
    const place = point => at(point).map((value, k) => (k ? Y : X)(value));
    const levels = ticks(Math.min(...gains.flat()), Math.max(...gains.flat()), 9);
    const label = level => {  // where the line meets the right edge
      const j = range(n - 1, k => k).find(k => gains[n - 1][k] < level !== gains[n - 1][k + 1] < level);
      return j > 1 && j < n - 3 ? text(346, place([n - 1, j + 0.5])[1] + 4,
                                       `${level > 0 ? "+" : ""}${String(level).replace("-", "−")}`, "soft end") : "";
    };
    return { half, X, Y, drawing: plot.draw(ticks(...xs, 5), ticks(...ys, 5))
      + levels.map(level => pairs(contour(gains, level).map(place), level ? "rule" : "soft")).join("")
      + [0.25, 1, 2.25].map(f => pairs(contour(kls, f * delta).map(place),
                                       `blue ${f === 1 ? "bold" : "thin"}`)).join("")
      + levels.map(label).join("") };
  }
  const knobs = { delta: ["δ, bound of KL", -3, 0, 0.05, -1, x => (10 ** x).toPrecision(2)],
                  damping: ["damping of A", 0, 0.2, 0.005, 0, x => fixed(x, 3)],
                  k: ["α, the fraction", 0, 9, 1, 0, k => fixed(0.8 ** k, 3)] };
  const note = "A policy with two weights on CartPole, π(right | s) = σ(θ<sub>1</sub> angle + "
    + "θ<sub>2</sub> angular velocity), and 300 samples of it; its second weight has the wrong sign. "
    + "Advantages: the script's GAE and critic. Blue: true KL of ¼, 1 and 2¼ δ, bold at δ; dashed: "
    + "δ by the quadratic model. Grey: L minus L(θ<sub>old</sub>). The picture zooms with δ.";
  const made = picture(div, 350, knobs, note, ({ delta: power, damping, k }) => {
    const delta = 10 ** power, alpha = 0.8 ** k;
    if (delta !== zoom) [zoom, background] = [delta, contours(delta)];
    const { X, Y } = background, { natural, gradient } = model.steps(delta, damping);
    const to = step => [X(theta[0] + step[0]), Y(theta[1] + step[1])], origin = to([0, 0]);
    const step = natural.map(x => alpha * x), { gain, kl } = model.after(step), other = model.after(gradient);
    const accepted = gain > 0 && kl <= delta;
    const [[a, b], [, d]] = model.fisher, det = a * d - b * b;
    const ellipse = range(73, i => {  // ½ xᵀ A x = δ, by A's Cholesky factor
      const [u, v] = [Math.cos(i * Math.PI / 36), Math.sin(i * Math.PI / 36)].map(x => x * Math.sqrt(2 * delta));
      const y = v / Math.sqrt(det / a);
      return to([u / Math.sqrt(a) - b / a * y, y]);
    });
    const name = (end, words, css) => text(end[0] + (end[0] < origin[0] ? -8 : 8), end[1] - 8, words,
                                           `${css} ${end[0] < origin[0] ? "end" : ""}`);
    const drawing = background.drawing + curve(ellipse, "blue dash")
      + arrow(...origin, ...to(gradient), "orange bold dash") + arrow(...origin, ...to(natural), "ink bold")
      + name(to(gradient), "gradient", "orange") + name(to(natural), "natural", "")
      + dot(...origin) + text(origin[0] + 8, origin[1] + 16, "θold")
      + dot(...to(step), accepted ? "" : "open")
      + text(350, 346, "θ₁, weight of the angle", "soft end")
      + `<g transform="rotate(-90 12 10)">${text(12, 14, "θ₂, of the angular velocity", "soft end")}</g>`;
    const verdict = accepted ? "KL ≤ δ and L rises: <b>accepted</b>."
      : `${kl > delta ? "KL is above δ" : "L does not rise"}: <b>shrunk</b> by 0.8.`;
    return [drawing, `Try ${k + 1}, α = ${fixed(alpha, 3)}: the true KL is ${fixed(kl, 4)}, by the `
      + `quadratic model ${fixed(model.quadratic(step), 4)}; L changes by ${fixed(gain, 4)}. ${verdict} `
      + `The gradient step, of KL δ by the model: ${fixed(other.kl, 4)}, ${fixed(other.gain, 4)}.`];
  });
  const found = () => model.tries(10 ** made.values.delta, made.values.damping);
  walk(made.panel, "line search", () => made.set("k", 0), () => {
    if (made.values.k + 1 >= found().length) return false;
    made.set("k", made.values.k + 1);
    return true;
  });
}

function update(div, { update: { clip: clipped, none } }) {
  const last = clipped.length - 1, total = clipped[0][0].reduce((a, b) => a + b), eps = 0.2;
  const shares = row => row[0].map(count => count / total), bins = clipped[0][0].length - 1;
  const most = Math.max(...[...clipped.slice(1), ...none.slice(1)].flatMap(shares));
  const plot = axes([0, 2.12], [0, most], [34, 354, 16, 160]), { X, Y } = plot;
  const edge = k => 2 * k / bins, high = share => Y(Math.min(share, most));
  const knobs = { epoch: ["epochs so far", 0, last, 1, last, String] };
  const note = `The first update of ppo_continuous.py on HalfCheetah: the ratios of all ${total} samples. `
    + "Blue: with clipping (Eq. 7), ε = 0.2. Orange: the same rollout without (Eq. 6, "
    + "<code>--objective none</code>). L<sup>CLIP</sup> is measured for both.";
  const made = picture(div, 290, knobs, note, ({ epoch }) => {
    const [ours, others] = [clipped, none].map(rows => shares(rows[epoch]));
    const bars = ours.map((share, k) => rect(X(edge(k)) + 0.3, high(share), X(edge(1)) - X(0) - 0.6,
                                             160 - high(share), "pale")).join("");
    const outline = others.flatMap((share, k) => [[X(edge(k)), high(share)], [X(edge(k + 1)), high(share)]]);
    const lines = ["L^CLIP", "KL", "clip fraction"].map((title, k) => {
      const column = rows => rows.map(row => row[k + 1]), all = [...column(clipped), ...column(none)];
      const small = axes([0, last], [Math.min(0, ...all), Math.max(...all)], [0, 96, 216, 260].map(
        (x, i) => i < 2 ? x + 14 + 122 * k : x));
      const draw = (rows, css) => curve(column(rows).map((y, x) => [small.X(x), small.Y(y)]), css);
      const value = rows => fixed(rows[epoch][k + 1], 3);
      return text(small.left, 208, title) + line(small.left, small.Y(0), small.right, small.Y(0), "rule")
        + line(small.X(epoch), 216, small.X(epoch), 260, "soft thin")
        + draw(none, "orange dash") + draw(clipped, "blue bold")
        + text(small.left, 279, value(clipped), "blue") + text(small.right, 279, value(none), "orange end");
    });
    const drawing = [1 - eps, 1 + eps].map(x => line(X(x), 16, X(x), 160, "soft dash thin")).join("")
      + text(X(1 - eps) - 4, 26, "1 − ε", "soft end") + text(X(1 + eps) + 4, 26, "1 + ε", "soft")
      + bars + curve(outline, "orange bold")
      + plot.draw([0, 0.5, 1, 1.5], ticks(0, most, 4), x => fixed(x, x % 1 ? 1 : 0))
      + text(354, 176, "&gt; 2", "soft end") + lines.join("");
    const outside = rows => percent(rows[epoch][3]);
    const says = epoch === 0 ? "Epoch 0: θ = θ<sub>old</sub>, and all ratios are exactly 1."
      : `After epoch ${epoch} of ${last}: with clipping ${outside(clipped)} of the ratios lie outside 1 ± ε, `
      + `without it ${outside(none)}. KL is ${fixed(clipped[epoch][2], 3)} and ${fixed(none[epoch][2], 3)}.`;
    return [drawing, says];
  });
  walk(made.panel, "play", () => made.set("epoch", 0), () => {
    made.set("epoch", made.values.epoch + 1);
    return made.values.epoch < last;
  });
}

const draw = { clip, gae, trust, update };
const recorded = JSON.parse(document.getElementById("recorded")?.textContent ?? "null");
for (const div of document.querySelectorAll(".moving")) draw[div.dataset.picture](div, recorded);
return { clipTerm, gaeWeights, twoWeights, contour, recorded };
})();
