/* Settings of MathJax, which the build copies into the site: TeX between \( \) and \[ \], written by the extension arithmatex. */
window.MathJax = {
  tex2jax: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]], processClass: "arithmatex", ignoreClass: ".*" },
  "HTML-CSS": { availableFonts: [], preferredFont: null, webFont: "STIX-Web", imageFont: null },
  showMathMenu: false,
  messageStyle: "none",
};
