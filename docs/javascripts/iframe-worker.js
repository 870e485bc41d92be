/* Search in pages opened as files. Browsers start no worker from file://, so that the search of the theme would stay empty.
   There, a Worker is replaced by a hidden frame that runs the same script and exchanges the same messages. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      const page = inside.document;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = page.createElement("script");
          script.src = source;
          script.onload = resolve;
          script.onerror = () => reject(new Error(`${source} cannot be loaded`));
          page.head.append(script);
        });
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      inside.__index = window.__index;
      load(new URL(url, document.baseURI).href).then(() => {
        this.ready = true;
        for (const data of this.waiting.splice(0)) this.postMessage(data);
      });
    }

    postMessage(data) {
      if (!this.ready) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
