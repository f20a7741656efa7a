// What the tests of the site look for in a page: each function is evaluated in the browser.

// Text that is too near to its background: ratios of luminances, as WCAG 2 (AA) defines them.
// Letters of 24 px, or of 18.66 px and bold, count as large.
const pale = () => {
  const rgba = (text) => {
    const parts = text.match(/[\d.]+(?=[ ,/)])/g).map(Number);
    const scale = text.startsWith('color(') ? 255 : 1;
    return [...parts.slice(0, 3).map((part) => part * scale), parts[3] ?? 1];
  };
  const over = (top, below) =>
    [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const grounds = new Map([[null, [255, 255, 255, 1]]]);
  const behind = (element) => {
    if (!grounds.has(element)) {
      const own = rgba(getComputedStyle(element).backgroundColor);
      grounds.set(element, own[3] === 1 ? own : over(own, behind(element.parentElement)));
    }
    return grounds.get(element);
  };
  const luminance = (color) => color.slice(0, 3)
    .map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const found = {};
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = texts.nextNode()); ) {
    const element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility() || element.closest('svg')) continue;
    const style = getComputedStyle(element);
    const ground = behind(element);
    const [a, b] = [luminance(over(rgba(style.color), ground)), luminance(ground)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5))
      found[`${style.color} on ${ground.slice(0, 3).map(Math.round)}, ${ratio.toFixed(2)}`] ??=
        `${element.tagName}.${element.className}: ${node.data.trim().slice(0, 30)}`;
  }
  return found;
};

const inside = () => [
  document.title,
  [...document.querySelectorAll('[id]')].map((e) => e.id),
  [...document.querySelectorAll('a[href]')].map((e) => e.href),
];

// How wide the article and all around it are. On a phone, the theme scrolls what is around it and
// hides what the document has too much, so the width of the document alone says nothing.
const width = () => {
  const widths = [];
  for (let e = document.querySelector('article') ?? document.body; e; e = e.parentElement)
    widths.push(e.scrollWidth);
  return Math.max(...widths);
};

// What makes the article too wide; a table or a block of code that scrolls by itself does not.
const wide = () => {
  const article = document.querySelector('article') ?? document.body;
  const scrolls = (e) =>
    e !== article && (getComputedStyle(e).overflowX !== 'visible' || scrolls(e.parentElement));
  return [...article.querySelectorAll('*')]
    .filter((e) => e.getBoundingClientRect().right > innerWidth && !scrolls(e.parentElement))
    .slice(0, 3).map((e) => `${e.tagName}.${e.className}: ${e.textContent.trim().slice(0, 30)}`);
};

// Words of tables that are broken although they are short: their columns are too narrow to read.
const broken = () => {
  const range = new Range();
  const found = new Set();
  for (const table of document.querySelectorAll('article table')) {
    const texts = document.createTreeWalker(table, NodeFilter.SHOW_TEXT);
    for (let node; (node = texts.nextNode()); )
      for (const word of node.data.matchAll(/[\d.]+|\w+/g)) {
        if (word[0].length > 20 || found.size === 5) continue;
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        if (range.getClientRects().length > 1) found.add(word[0]);
      }
  }
  return [...found];
};
