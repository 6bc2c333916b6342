// Markdown as it streams. HTML in it stays text, links open elsewhere, and images from other hosts are links.

const reader = window.markdownit({ html: false, linkify: true, breaks: false });
const policy = window.trustedTypes?.createPolicy("quire", { createHTML: (text) => text });

reader.renderer.rules.link_open = (tokens, index, options, env, self) => {
  tokens[index].attrSet("target", "_blank");
  tokens[index].attrSet("rel", "noopener noreferrer");
  return self.renderToken(tokens, index, options);
};
reader.renderer.rules.image = (tokens, index) => {
  const [source, text] = [tokens[index].attrGet("src"), reader.utils.escapeHtml(tokens[index].content)];
  return source.startsWith("data:") ? `<img src="${reader.utils.escapeHtml(source)}" alt="${text}">` : `[${text}: ${reader.utils.escapeHtml(source)}]`;
};

// Writes into `target` at most once a frame, however often it is called.
export class Markdown {
  constructor(target) {
    this.target = target;
    this.text = "";
    this.due = false;
  }

  add(text) {
    this.text += text;
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.due = false;
    const html = reader.render(this.text);
    this.target.innerHTML = policy ? policy.createHTML(html) : html;
    for (const block of this.target.querySelectorAll("pre")) block.tabIndex = 0;
  }
}
