// Shows the documents of each task: search, right and wrong, pages, and one document as `#task=NAME&doc=ID`.
// All texts become text nodes, so no document is parsed as HTML.
"use strict";
(() => {
  const PAGE = 25;

  const make = (name, attributes, ...children) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (value !== undefined && value !== false) element.setAttribute(key, value);
    }
    element.append(...children.filter((child) => child !== undefined && child !== null));
    return element;
  };

  // The end of a prompt is the question; few-shot examples precede it.
  const ending = (text) => {
    const line = text.replace(/\s+/g, " ").trim();
    return line.length > 160 ? "…" + line.slice(-160) : line;
  };
  const number = (value) =>
    typeof value !== "number" ? JSON.stringify(value) : Number.isInteger(value) ? String(value) : value.toFixed(4);
  const isScored = (asked) => asked.logprob !== undefined;
  const isChoice = (doc) => doc.asked.length > 1 && isScored(doc.asked[0]);
  const choices = (doc) => {
    const known = doc.asked.filter((asked) => asked.right !== undefined);
    return known.length > 0 ? known : doc.asked;
  };
  const chosen = (doc) =>
    choices(doc).reduce((best, asked) => ((asked.logprob ?? -Infinity) > (best.logprob ?? -Infinity) ? asked : best));
  const nameOf = (asked) => asked.text ?? asked.prompt ?? "";

  const said = (doc) => {
    if (isChoice(doc)) return nameOf(chosen(doc)).trim();
    const [first] = doc.asked;
    if (!first) return "";
    return isScored(first) ? number(first.logprob) : ending((first.answers || []).join(" | "));
  };

  const texts = (doc) =>
    [String(doc.id), doc.prompt, doc.target]
      .concat(doc.asked.flatMap((asked) => [asked.prompt, asked.text, ...(asked.answers || [])]))
      .concat(doc.filters.map((filter) => (filter.answer === undefined ? "" : JSON.stringify(filter.answer))))
      .filter((text) => text)
      .join("\n")
      .toLowerCase();

  // Names of all metrics, as "metric,filter".
  const metricsOf = (docs) => {
    const names = new Set();
    docs.forEach((doc) => doc.filters.forEach((f) => Object.keys(f.metrics).forEach((m) => names.add(m + "," + f.name))));
    return [...names];
  };
  const valueOf = (doc, key) => {
    const at = key.lastIndexOf(",");
    const filter = doc.filters.find((filter) => filter.name === key.slice(at + 1));
    const value = filter && filter.metrics[key.slice(0, at)];
    return typeof value === "boolean" ? Number(value) : value;
  };
  // A value of 1 is right and 0 is wrong; other values are neither.
  const verdict = (value) => (value === 1 ? "right" : value === 0 ? "wrong" : "");

  const chip = (value, name) => make("span", { class: "chip " + verdict(value) }, (name ? name + " " : "") + number(value));

  const scoredTable = (doc) => {
    const likeliest = chosen(doc);
    const row = (asked) => {
      const marks = [asked.right ? "right" : "", asked === likeliest && isChoice(doc) ? "likeliest" : ""];
      return make(
        "tr",
        { class: asked.right ? "right" : "" },
        make("td", {}, (asked.prompt !== undefined ? asked.prompt : "") + (asked.text ?? "")),
        make("td", { class: "number" + (asked === likeliest ? " chosen" : "") }, number(asked.logprob)),
        make("td", {}, asked.greedy === undefined ? "" : asked.greedy ? "yes" : "no"),
        make("td", {}, marks.filter((mark) => mark).join(", ")),
      );
    };
    const heads = [isChoice(doc) ? "Choice" : "Text", "Log-likelihood", "Greedy", ""];
    const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
    return make("div", { class: "wide" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...doc.asked.map(row))));
  };

  const part = (title, ...content) => [make("h3", {}, title), ...content];

  const filterParts = (filter, nFilters) => {
    const title = nFilters > 1 ? "Filter " + filter.name : "Scores";
    const values = Object.entries(filter.metrics).map(([name, value]) => [chip(typeof value === "boolean" ? Number(value) : value, name), " "]);
    const answers = (filter.answer || []).map((answer) => make("pre", { class: "filtered" }, typeof answer === "string" ? answer : JSON.stringify(answer)));
    return [...(filter.answer ? part(title + ": filtered answer", ...answers) : part(title)), make("p", { class: "metrics" }, ...values.flat())];
  };

  const detail = (doc) => {
    const answers = doc.asked.flatMap((asked) => asked.answers || []);
    return make(
      "div",
      { class: "detail" },
      ...part("Prompt", make("pre", { class: "prompt" }, doc.prompt)),
      ...part("Target", make("pre", { class: "target" }, doc.target)),
      ...(doc.asked.some(isScored) ? part(isChoice(doc) ? "Choices" : "Scored", scoredTable(doc)) : []),
      ...(answers.length > 0 ? part("Answer", ...answers.map((text) => make("pre", { class: "answer" }, text))) : []),
      ...doc.filters.flatMap((filter) => filterParts(filter, doc.filters.length)),
    );
  };

  class Samples {
    constructor(section) {
      this.section = section;
      this.docs = JSON.parse(section.querySelector("script.docs").textContent);
      this.texts = null;
      this.metrics = metricsOf(this.docs);
      this.page = 0;
      this.open = null;
      this.build();
    }

    build() {
      const changed = () => { this.page = 0; this.show(); };
      this.search = make("input", { type: "search", placeholder: "Search prompts, targets and answers", "aria-label": "Search", oninput: changed });
      const verdicts = [["", "all"], ["right", "right"], ["wrong", "wrong"]];
      this.verdict = make("select", { "aria-label": "Right or wrong", onchange: changed }, ...verdicts.map(([value, text]) => make("option", { value }, text)));
      this.metric = make("select", { "aria-label": "Metric", onchange: changed }, ...this.metrics.map((key) => make("option", { value: key }, key.replace(/,none$/, ""))));
      this.metric.hidden = this.metrics.length < 2;
      const turn = (by) => () => { this.page += by; this.show(); };
      this.back = make("button", { type: "button", onclick: turn(-1) }, "‹ Back");
      this.next = make("button", { type: "button", onclick: turn(1) }, "Next ›");
      this.count = make("span", { class: "note count" });
      this.list = make("ol", { class: "list" });
      const tools = make("div", { class: "tools" }, this.search, this.verdict, this.metric, this.count, this.back, this.next);
      this.section.querySelector(".samples").replaceChildren(tools, this.list);
      this.show();
    }

    found() {
      const words = this.search.value.toLowerCase().trim();
      const wanted = this.verdict.value;
      if (words && !this.texts) this.texts = new Map(this.docs.map((doc) => [doc, texts(doc)]));
      return this.docs.filter(
        (doc) => (!words || this.texts.get(doc).includes(words)) && (!wanted || verdict(valueOf(doc, this.metric.value)) === wanted),
      );
    }

    show() {
      const found = this.found();
      const nPages = Math.max(1, Math.ceil(found.length / PAGE));
      this.page = Math.min(Math.max(this.page, 0), nPages - 1);
      const first = this.page * PAGE;
      const shown = found.slice(first, first + PAGE);
      const range = shown.length === 0 ? "none" : first + 1 + "–" + (first + shown.length);
      this.count.textContent = range + " of " + found.length + (found.length < this.docs.length ? ", " + this.docs.length + " in all" : "");
      this.back.disabled = this.page === 0;
      this.next.disabled = this.page + 1 >= nPages;
      this.list.replaceChildren(...shown.map((doc) => this.row(doc)));
    }

    row(doc) {
      const value = this.metric.value ? valueOf(doc, this.metric.value) : undefined;
      const plain = typeof value === "number" || value === null;
      const isOpen = this.open === doc.id;
      const head = make(
        "button",
        { type: "button", class: "head", "aria-expanded": String(isOpen), onclick: () => this.toggle(doc.id) },
        make("span", {}, "#" + doc.id),
        make("span", { class: "asked" }, ending(doc.prompt || nameOf(doc.asked[0] || {}))),
        make("span", { class: "said" }, said(doc)),
        plain ? chip(value) : make("span", {}),
      );
      return make("li", { "data-doc": doc.id }, head, isOpen ? detail(doc) : null);
    }

    toggle(id) {
      this.open = this.open === id ? null : id;
      const name = "#task=" + encodeURIComponent(this.section.dataset.task);
      history.replaceState(null, "", this.open === null ? name : name + "&doc=" + id);
      this.show();
    }

    // Opens a document and the page of the list that contains it.
    reveal(id) {
      this.search.value = "";
      this.verdict.value = "";
      const at = this.docs.findIndex((doc) => doc.id === id);
      if (at < 0) return null;
      this.page = Math.floor(at / PAGE);
      this.open = id;
      this.show();
      return this.list.querySelector('[data-doc="' + id + '"]');
    }
  }

  const known = new Map();
  const samplesOf = (section) => {
    if (!known.has(section)) known.set(section, new Samples(section));
    return known.get(section);
  };
  const sections = [...document.querySelectorAll("details.task")];

  const follow = () => {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const section = sections.find((section) => section.dataset.task === wanted.get("task"));
    if (!section) return;
    section.open = true;
    const samples = samplesOf(section);
    const row = wanted.has("doc") ? samples.reveal(Number(wanted.get("doc"))) : null;
    (row || section).scrollIntoView();
  };

  for (const section of sections) {
    section.addEventListener("toggle", () => section.open && samplesOf(section));
    if (section.open) samplesOf(section);
  }
  window.addEventListener("hashchange", follow);
  follow();
})();
