// The front end of a notebook and of the app, in the form of anywidget.

import { render } from "./page.js";
import { Source, unpack } from "./source.js";

export default { render, Source, unpack };
