"use strict";
/* Draws the charts and the token strips of a report. All text reaches the page as text, never as markup. */
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const STEPS = [0.001, 0.01, 0.1, Math.LN2, 3];
  const PAPER = 680; // CSS pixels between the margins of A4

  // ---- theme -------------------------------------------------------------------------------------------------------
  const themes = ["automatic", "light", "dark"];
  const toggle = document.getElementById("theme");
  toggle.addEventListener("click", () => {
    const now = themes[(themes.indexOf(root.dataset.theme || "automatic") + 1) % themes.length];
    if (now === "automatic") delete root.dataset.theme;
    else root.dataset.theme = now;
    toggle.textContent = `Theme: ${now}`;
  });
  toggle.hidden = false;

  // ---- numbers and rows --------------------------------------------------------------------------------------------
  const FORMS = {
    text: String,
    number: (value) => (value === 0 || (Math.abs(value) >= 1e-4 && Math.abs(value) < 1e6) ? String(+value.toPrecision(5)) : value.toExponential(3).replace("-", "-\u2060")),
    percent: (value) => `${+(100 * value).toPrecision(4)}%`,
  };

  function records(blocks) {
    const rows = [];
    for (const block of blocks) {
      const keys = Object.keys(block);
      const lengths = keys.filter((key) => Array.isArray(block[key])).map((key) => block[key].length);
      const count = lengths.length ? lengths[0] : 1;
      for (let i = 0; i < count; i++) {
        const row = {};
        for (const key of keys) row[key] = Array.isArray(block[key]) ? block[key][i] : block[key];
        rows.push(row);
      }
    }
    return rows;
  }

  function element(name, text, properties) {
    const made = Object.assign(document.createElement(name), properties);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function fillTable(box, choice) {
    const head = element("tr");
    for (const column of choice.columns) head.append(element("th", column.title, { scope: "col", className: column.form === "text" ? "" : "number" }));
    const body = element("tbody");
    for (const row of records(choice.blocks)) {
      const line = element("tr");
      for (const column of choice.columns) {
        const cell = element("td", FORMS[column.form](row[column.key]), { className: column.form === "text" ? "" : "number" });
        cell.dataset.name = column.title;
        line.append(cell);
      }
      body.append(line);
    }
    const table = element("table");
    const top = element("thead");
    top.append(head);
    table.append(top, body);
    box.replaceChildren(table);
  }

  // ---- charts ------------------------------------------------------------------------------------------------------
  const offline = { load: () => Promise.reject(new Error("a report loads nothing")), sanitize: () => Promise.reject(new Error("a report has no links")), file: () => Promise.reject(), http: () => Promise.reject() };
  const views = new Map();

  async function draw(figure, number) {
    const name = figure.dataset.chart;
    const choice = data.charts[name][number];
    const plot = figure.querySelector(".plot");
    figure.querySelector("figcaption").textContent = choice.caption;
    plot.setAttribute("aria-label", choice.caption);
    const printed = figure.querySelector(".printed");
    if (printed) printed.textContent = choice.label;
    const table = figure.querySelector("details");
    if (table.open) fillTable(table.querySelector(".rows"), choice);
    else table.querySelector(".rows").replaceChildren();
    if (views.has(name)) views.get(name).finalize();
    try {
      const spec = { ...choice.spec, data: { values: records(choice.blocks) } };
      // Vega names what it draws in by itself; the sentence is on the element around it.
      const canvas = element("div", undefined, { ariaHidden: "true" });
      plot.replaceChildren(canvas);
      const made = await vegaEmbed(canvas, spec, {
        mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false, config: data.config, loader: offline,
        tooltip: { disableDefaultStyle: true },
      });
      views.set(name, made);
    } catch (error) {
      plot.textContent = `This chart could not be drawn: ${error.message}. Its numbers are in the table below.`;
      root.dataset.failed = name;
      console.error(error);
    }
  }

  function connect(figure) {
    const choices = data.charts[figure.dataset.chart];
    const select = figure.querySelector("select");
    const number = () => (select ? Number(select.value) : 0);
    if (select) select.addEventListener("change", () => draw(figure, number()));
    const table = figure.querySelector("details");
    table.addEventListener("toggle", () => {
      if (table.open) fillTable(table.querySelector(".rows"), choices[number()]);
    });
    return draw(figure, number());
  }

  // ---- strips ------------------------------------------------------------------------------------------------------
  const level = (d) => STEPS.filter((step) => Math.abs(d) >= step).length;

  function details(strip, i) {
    const parts = [`token ${i + 1} of ${strip.text.length}`, JSON.stringify(strip.text[i])];
    const turn = strip.turns.filter((each) => each.at <= i).pop();
    if (turn) parts.push(turn.name);
    if (!strip.sampled[i]) parts.push("given, not sampled");
    if (strip.d[i] !== null) parts.push(`d = ${FORMS.number(strip.d[i])}\u00a0nats (trainer less rollout)`);
    if (strip.logprob[i] !== null) parts.push(`rollout log-prob ${FORMS.number(strip.logprob[i])}`);
    if (strip.layers[i] !== null) parts.push(`other experts in ${strip.layers[i]}\u00a0MoE layers`);
    if (strip.kept[i] !== null) parts.push(strip.kept[i] === 0 ? "full vocabulary" : `drawn from ${strip.kept[i]}\u00a0ids`);
    if (strip.version[i] !== null) parts.push(`policy version ${strip.version[i]}`);
    return parts.join(" · ");
  }

  function connectStrips(section) {
    const select = section.querySelector("select");
    const box = section.querySelector(".tokens");
    const line = section.querySelector(".token-line");
    let strip, at;
    let tokens = [];

    function move(to) {
      const old = tokens[at];
      if (old) { old.tabIndex = -1; old.setAttribute("aria-selected", "false"); }
      at = Math.max(0, Math.min(strip.text.length - 1, to));
      const token = tokens[at];
      token.tabIndex = 0;
      token.setAttribute("aria-selected", "true");
      line.textContent = details(strip, at);
      return token;
    }

    function far(from, by) {
      for (let i = from + by; i >= 0 && i < strip.text.length; i += by) {
        if (strip.d[i] !== null && Math.abs(strip.d[i]) >= Math.LN2) return i;
      }
      return from;
    }

    function show() {
      strip = data.strips[Number(select.value)];
      at = -1;
      const printed = section.querySelector(".printed");
      printed.textContent = select.options[select.selectedIndex].textContent;
      tokens = strip.text.map((text, i) => {
        const kind = strip.d[i] === null ? "given" : `s${level(strip.d[i])}`;
        const token = element("span", text.replace(/\n/g, "↵").replace(/\t/g, "⇥") || "∅", { className: `token ${kind}${strip.layers[i] ? " rerouted" : ""}`, tabIndex: -1 });
        token.setAttribute("role", "option");
        token.setAttribute("aria-label", details(strip, i));
        return token;
      });
      // A line break of the text stands behind its token, the author of a turn before its first one.
      const named = new Map(strip.turns.map((turn) => [turn.at, turn.name]));
      box.replaceChildren(...tokens.flatMap((token, i) => {
        const before = named.has(i) ? [element("span", named.get(i), { className: "turn-name", ariaHidden: "true" })] : [];
        return [...before, token, ...(strip.text[i].includes("\n") && !named.has(i + 1) ? [element("br")] : [])];
      }));
      let worst = -1;
      strip.d.forEach((d, i) => { if (d !== null && (worst < 0 || Math.abs(d) > Math.abs(strip.d[worst]))) worst = i; });
      move(Math.max(0, worst));
    }

    const STRIDES = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };
    box.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      let to = null;
      if (event.key in STRIDES) to = at + STRIDES[event.key];
      else if (event.key === "n") to = far(at, 1);
      else if (event.key === "p") to = far(at, -1);
      if (to === null) return;
      event.preventDefault();
      move(to).focus();
    });
    const find = (event) => tokens.indexOf(event.target.closest(".token"));
    box.addEventListener("click", (event) => { const i = find(event); if (i >= 0) move(i).focus(); });
    select.addEventListener("change", show);
    show();
  }

  // ---- width -------------------------------------------------------------------------------------------------------
  // A second pass: where the first one gave a legend more lines, the drawing is higher.
  const fit = (width) => { for (const made of views.values()) made.view.width(width).run().resize().run(); };
  const fitWindow = () => { if (views.size) fit(document.querySelector(".plot").clientWidth); };
  let resized;
  window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(fitWindow, 100); });
  // On paper texts of charts stay as large as those of the page.
  window.addEventListener("beforeprint", () => fit(PAPER));
  window.addEventListener("afterprint", fitWindow);

  const strips = document.getElementById("strip-view");
  if (strips) connectStrips(strips);
  (async () => {
    for (const figure of document.querySelectorAll("figure[data-chart]")) await connect(figure);
    root.dataset.ready = "yes";
  })();
})();
