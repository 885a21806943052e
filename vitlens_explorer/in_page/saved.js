// A saved page, which `in_page` wrote with all that its views show.

import { openPage, readRecords } from "./opening.js";

openPage(readRecords);
