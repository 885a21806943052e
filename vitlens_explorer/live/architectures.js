// From the files of a model to what vit.js runs: {about: description, tensors: {name: {shape, values()}}, notes, …}.
// The names of timm and of transformers become those of vit.js. A tensor is used, or a note names it, or the model is
// refused. `KNOWN` is known.json.

import { sumOf } from "../front/values.js";
import { LONGEST_JSON, readJson } from "./json.js";
import { resizePositions } from "./positions.js";
import { clip, isCount, isObject, refuse } from "./refuse.js";
import { loadTensor, readCheckpoint } from "./safetensors.js";
import { describeSize } from "./sizes.js";
import KNOWN from "./known.json" with { type: "json" };

const PATCHES_LIMIT = 16384; // patches of an image
const MOST_CLASSES = 1_000_000;
const IMAGENET_TAG = /(^|[_.])in1k($|[_.])/;
const ARGUMENTS = new Set([
  "img_size",
  "patch_size",
  "in_chans",
  "num_classes",
  "global_pool",
  "embed_dim",
  "depth",
  "num_heads",
  "mlp_ratio",
  "qkv_bias",
  "proj_bias",
  "init_values",
  "class_token",
  "no_embed_class",
  "reg_tokens",
  "pre_norm",
  "final_norm",
  "fc_norm",
  "act_layer",
  "dynamic_img_size",
  "drop_rate",
  "pos_drop_rate",
  "patch_drop_rate",
  "proj_drop_rate",
  "attn_drop_rate",
  "drop_path_rate",
  "weight_init",
  "fix_init",
]); // of timm's `model_args` that the tensors show, that this file reads, or that count in training only
const TIMM_ACTIVATIONS = ["gelu", "gelu_tanh", "quick_gelu"];
const HUB_ACTIVATIONS = {
  gelu: "gelu",
  gelu_python: "gelu",
  gelu_new: "gelu_tanh",
  gelu_fast: "gelu_tanh",
  gelu_pytorch_tanh: "gelu_tanh",
  quick_gelu: "quick_gelu",
};
const OUTPUT_KINDS = { multi_label_classification: "independent", regression: "value" };
const INTERPOLATIONS = new Map([
  [2, "bilinear"],
  [3, "bicubic"],
]); // by Pillow's number
const TOWERS = new Map([
  ["clip", "clip_vision_model"],
  ["siglip", "siglip_vision_model"],
]); // type of the image tower by that of the whole model

const countOf = (shape) => shape.reduce((product, side) => product * side, 1);
const shown = (shape) => shape.join(" × ") || "a single number";

// The tensors of a checkpoint, of which each can be used once.
class Supply {
  constructor(stored) {
    this.stored = stored;
    this.left = new Set(stored.keys());
    this.unused = []; // names that are known and not needed
  }

  has(name) {
    return this.left.has(name);
  }

  // A tensor by name, with the shape that is expected if one is given: {shape, values()}.
  take(name, expected = null) {
    const tensor = this.stored.get(name);
    if (!tensor || !this.left.delete(name)) refuse("missing tensor", { tensor: clip(name) });
    const { shape } = tensor;
    if (expected && String(shape) !== String(expected)) {
      const fields = { tensor: clip(name), shape: shown(shape), expected: shown(expected) };
      refuse("wrong shape", fields);
    }
    return { shape, values: () => loadTensor(name, tensor) };
  }

  // The shape of a tensor that is used later.
  shape(name) {
    const tensor = this.stored.get(name);
    if (!tensor) refuse("missing tensor", { tensor: clip(name) });
    return tensor.shape;
  }

  // Marks tensors as known and not needed.
  leave(pattern) {
    for (const name of this.left) {
      if (pattern?.test(name)) {
        this.left.delete(name);
        this.unused.push(name);
      }
    }
  }

  finish() {
    if (!this.left.size) return;
    const names = [...this.left].slice(0, 3).map(clip).join(", ");
    refuse("unknown tensors", { count: this.left.size, names });
  }
}

// Names of timm's tensors. `special` tokens come before the patches in this order.
const TIMM_NAMES = {
  special: ["cls_token", "dist_token", "reg_token"],
  positions: "pos_embed",
  embed: "patch_embed.proj",
  normPre: "norm_pre",
  norm: "norm",
  normPooled: "fc_norm",
  heads: ["head", "head_dist"],
  block: (layer) => ({
    norm1: `blocks.${layer}.norm1`,
    qkv: [`blocks.${layer}.attn.qkv`],
    proj: `blocks.${layer}.attn.proj`,
    scale1: `blocks.${layer}.ls1.gamma`,
    norm2: `blocks.${layer}.norm2`,
    fc1: `blocks.${layer}.mlp.fc1`,
    fc2: `blocks.${layer}.mlp.fc2`,
    scale2: `blocks.${layer}.ls2.gamma`,
  }),
};

// Names of transformers' ViT below a prefix such as "vit.".
function vitNames(prefix) {
  return {
    special: [`${prefix}embeddings.cls_token`],
    positions: `${prefix}embeddings.position_embeddings`,
    embed: `${prefix}embeddings.patch_embeddings.projection`,
    norm: `${prefix}layernorm`,
    heads: ["classifier"],
    unused: /(^|\.)(pooler\.dense\.(weight|bias)|embeddings\.mask_token)$/,
    block: (layer) => {
      const block = `${prefix}encoder.layer.${layer}`;
      return {
        norm1: `${block}.layernorm_before`,
        qkv: ["query", "key", "value"].map((part) => `${block}.attention.attention.${part}`),
        proj: `${block}.attention.output.dense`,
        norm2: `${block}.layernorm_after`,
        fc1: `${block}.intermediate.dense`,
        fc2: `${block}.output.dense`,
      };
    },
  };
}

// Names of transformers' DeiT.
function deitNames(prefix) {
  const special = [`${prefix}embeddings.cls_token`, `${prefix}embeddings.distillation_token`];
  return { ...vitNames(prefix), special };
}

// Names of transformers' DINOv2 with registers, which come between the class token and the patches.
function registerNames(prefix) {
  const special = [`${prefix}embeddings.cls_token`, `${prefix}embeddings.register_tokens`];
  return { ...dinoNames(prefix), special };
}

// Names of transformers' DINOv2.
function dinoNames(prefix) {
  const names = vitNames(prefix);
  return {
    ...names,
    block: (layer) => {
      const block = `${prefix}encoder.layer.${layer}`;
      return {
        ...names.block(layer),
        norm1: `${block}.norm1`,
        scale1: `${block}.layer_scale1.lambda1`,
        norm2: `${block}.norm2`,
        fc1: `${block}.mlp.fc1`,
        fc2: `${block}.mlp.fc2`,
        scale2: `${block}.layer_scale2.lambda1`,
      };
    },
  };
}

// Names of the image towers of transformers' CLIP and SigLIP.
function towerNames(prefix) {
  return {
    special: [`${prefix}embeddings.class_embedding`],
    positions: `${prefix}embeddings.position_embedding.weight`,
    embed: `${prefix}embeddings.patch_embedding`,
    embedBias: false,
    normPre: `${prefix}pre_layrnorm`,
    heads: ["classifier"],
    unused:
      /(^|\.)embeddings\.position_ids$|^text_model\.|^(visual|text)_projection\.weight$|^logit_(scale|bias)$/,
    block: (layer) => {
      const block = `${prefix}encoder.layers.${layer}`;
      return {
        norm1: `${block}.layer_norm1`,
        qkv: ["q", "k", "v"].map((part) => `${block}.self_attn.${part}_proj`),
        proj: `${block}.self_attn.out_proj`,
        norm2: `${block}.layer_norm2`,
        fc1: `${block}.mlp.fc1`,
        fc2: `${block}.mlp.fc2`,
      };
    },
  };
}

// transformers' classes: {family: `model_type` of the image tower, names: of the tensors, reads: what the head reads,
// classifies: true with a classifier, smooth: true if positions are resized with antialiasing, pooled: name of the
// linear layer that makes the output of a model without classes, bends: true if a tanh follows it}.
const POOLER = { reads: "token", pooled: "pooler.dense", bends: true };
const PROJECTION = { reads: "token", pooled: "visual_projection" };
const HUB_MODELS = {
  ViTModel: { family: "vit", names: vitNames(""), ...POOLER },
  ViTForImageClassification: {
    family: "vit",
    names: vitNames("vit."),
    reads: "token",
    classifies: true,
  },
  DeiTModel: { family: "deit", names: deitNames(""), ...POOLER },
  DeiTForImageClassification: {
    family: "deit",
    names: deitNames("deit."),
    reads: "token",
    classifies: true,
  },
  DeiTForImageClassificationWithTeacher: {
    family: "deit",
    names: { ...deitNames("deit."), heads: ["cls_classifier", "distillation_classifier"] },
    reads: "two tokens",
    classifies: true,
  },
  Dinov2Model: { family: "dinov2", names: dinoNames(""), reads: "token" },
  Dinov2ForImageClassification: {
    family: "dinov2",
    names: dinoNames("dinov2."),
    reads: "token and patches",
    classifies: true,
  },
  Dinov2WithRegistersModel: {
    family: "dinov2_with_registers",
    names: registerNames(""),
    reads: "token",
    smooth: true,
  },
  Dinov2WithRegistersForImageClassification: {
    family: "dinov2_with_registers",
    names: registerNames("dinov2_with_registers."),
    reads: "token and patches",
    classifies: true,
    smooth: true,
  },
  CLIPVisionModel: {
    family: "clip_vision_model",
    names: [clipNames(""), clipNames("vision_model.")],
    reads: "token",
  },
  CLIPVisionModelWithProjection: {
    family: "clip_vision_model",
    names: clipNames("vision_model."),
    ...PROJECTION,
  },
  CLIPModel: { family: "clip_vision_model", names: clipNames("vision_model."), ...PROJECTION },
  CLIPForImageClassification: {
    family: "clip_vision_model",
    names: {
      ...towerNames("vision_model."),
      unused: /^vision_model\.(post_layernorm\.(weight|bias)|embeddings\.position_ids)$/,
    },
    reads: "patches",
    classifies: true,
  },
  SiglipForImageClassification: {
    family: "siglip_vision_model",
    names: siglipNames("vision_model."),
    reads: "patches",
    classifies: true,
  },
};

function clipNames(prefix) {
  return { ...towerNames(prefix), norm: `${prefix}post_layernorm` };
}

// The attention pool of SigLIP is not read by the classifier.
function siglipNames(prefix) {
  return {
    ...clipNames(prefix),
    special: [],
    embedBias: true,
    normPre: "",
    unused: /^vision_model\.(head\.|embeddings\.position_ids$)/,
  };
}

// The first of some values that is not absent.
const firstOf = (...values) => values.find((value) => value !== undefined && value !== null);

// An option that must be a whole number from 1 to a limit.
function readCount(value, name, most = 2 ** 20) {
  if (!isCount(value) || value < 1 || value > most) {
    refuse("bad number", { name, value: clip(value), most: most.toLocaleString("en") });
  }
  return value;
}

// The side of a square given as n, [n, n] or {height, width}.
function readSide(value, name) {
  const sides = isObject(value) ? [value.height, value.width] : [value].flat();
  if (!sides.length || sides.length > 2 || sides.some((side) => side !== sides[0])) {
    refuse("not square", { name, value: clip(value) });
  }
  return readCount(sides[0], name, 65536);
}

function readEps(value) {
  if (typeof value !== "number" || !(value > 0 && value < 1)) {
    refuse("bad value", { name: "layer_norm_eps", value: clip(value) });
  }
  return value;
}

// Three numbers for the colors.
function readColors(value, name, isValid) {
  const isGood = Array.isArray(value) && value.length === 3 && value.every(isValid);
  if (!isGood) refuse("bad value", { name, value: clip(value) });
  return value;
}

const isBounded = (value) => Number.isFinite(value) && Math.abs(value) < 1000;
const isPositive = (value) => isBounded(value) && value > 0;

// Refuses a number of the configuration that is not that of the tensors.
function compare(name, stated, held) {
  if (stated !== held) refuse("other size", { name, stated: clip(stated), held });
}

// timm's settings of an architecture, by its name without the tag.
function findTimm(architecture) {
  const name = architecture.split(".")[0];
  const found = KNOWN.timm.find(({ names }) => names.includes(name));
  if (!found) refuse("unknown architecture", { name: clip(name) });
  return found;
}

// The note on an architecture that another one differs from by its activation only.
function twinNotes(architecture) {
  const [name] = architecture.split(".");
  const twin = name.replace("_clip_", "_clip_quickgelu_");
  const exists = twin !== name && KNOWN.timm.some(({ names }) => names.includes(twin));
  return exists ? [["twin", { name, twin }]] : [];
}

// What a timm configuration says about the forward.
function readTimm(config) {
  const { architecture } = config;
  const known = findTimm(architecture);
  const args = firstOf(config.model_args, {});
  if (!isObject(args)) refuse("bad value", { name: "model_args", value: clip(args) });
  for (const [name, value] of Object.entries(args)) {
    const isIdle = value === null || value === false;
    if (!ARGUMENTS.has(name) && !isIdle) {
      refuse("unknown argument", { name: clip(name), value: clip(value) });
    }
  }
  const activation = firstOf(args.act_layer, known.activation);
  if (!TIMM_ACTIVATIONS.includes(activation)) {
    refuse("unknown activation", { name: clip(activation) });
  }
  const pool = firstOf(args.global_pool, known.pool);
  if (!["token", "avg"].includes(pool)) refuse("unknown pool", { name: clip(pool) });
  const stated = firstOf(config.global_pool, pool);
  if (stated !== pool) refuse("two pools", { stated: clip(stated), pool });
  const pretrained = firstOf(config.pretrained_cfg, config);
  if (!isObject(pretrained))
    refuse("bad value", { name: "pretrained_cfg", value: clip(pretrained) });
  const classes = firstOf(args.num_classes, config.num_classes, pretrained.num_classes);
  const reads = { token: "token", avg: "patches" }[pool];
  const { notes, ...pixels } = readTimmPixels(config, pretrained, args);
  return {
    names: TIMM_NAMES,
    library: "timm",
    architecture,
    heads: readCount(firstOf(args.num_heads, known.heads), "num_heads"),
    width: firstOf(args.embed_dim, known.width),
    layers: firstOf(args.depth, known.depth),
    patch: readSide(firstOf(args.patch_size, known.patch), "patch_size"),
    eps: known.eps,
    activation,
    reads: known.distilled ? "two tokens" : reads,
    special: timmTokens(args, known),
    placesAll: !firstOf(args.no_embed_class, !known.placesPrefix),
    smooth: true,
    ...readTimmParts(args, known, pool),
    classifies: firstOf(classes, 1000) !== 0,
    classes: firstOf(classes, 1000),
    outputs: config.outputs,
    imageSize: null,
    ...pixels,
    notes: args.act_layer ? notes : [...notes, ...twinNotes(architecture)],
    ...readTimmClasses(config, pretrained),
  };
}

// Number of special tokens by the name of their tensor.
function timmTokens(args, known) {
  const registers = firstOf(args.reg_tokens, known.registers);
  return {
    cls_token: Number(firstOf(args.class_token, known.classToken)),
    dist_token: Number(known.distilled),
    reg_token: registers ? readCount(registers, "reg_tokens", 1024) : 0,
  };
}

// Parts that a timm model has or lacks.
function readTimmParts(args, known, pool) {
  const pools = pool === known.pool ? known.normPooled : pool === "avg";
  const norms = firstOf(args.final_norm, true);
  const isPooled = firstOf(args.fc_norm, pools);
  const normPre = Boolean(firstOf(args.pre_norm, known.normPre));
  return {
    qkvBias: Boolean(firstOf(args.qkv_bias, known.qkvBias)),
    projBias: Boolean(firstOf(args.proj_bias, true)),
    embedBias: !normPre,
    scaled: "init_values" in args ? Boolean(args.init_values) : known.scaled,
    hasNormPre: normPre,
    hasNorm: norms && !isPooled,
    hasNormPooled: norms && isPooled,
  };
}

// timm's preprocessing: {size, resized(side), squeezed, interpolation, mean, std, notes}.
function readTimmPixels(config, pretrained, args) {
  const notes = [];
  const names = ["input_size", "interpolation", "crop_pct", "mean", "std"];
  const absent = names.filter((name) => firstOf(pretrained[name]) === undefined);
  if (absent.length) notes.push(["assumed", { names: absent.join(", "), library: "timm" }]);
  const input = firstOf(pretrained.input_size, null);
  if (input !== null && (!Array.isArray(input) || input.length !== 3)) {
    refuse("bad value", { name: "input_size", value: clip(input) });
  }
  const stated = firstOf(args.img_size, input?.slice(1));
  const share = firstOf(pretrained.crop_pct, 0.875);
  if (!(isPositive(share) && share <= 1)) {
    refuse("bad value", { name: "crop_pct", value: clip(share) });
  }
  const mode = firstOf(pretrained.crop_mode, "center");
  if (!["center", "squash"].includes(mode)) {
    refuse("bad value", { name: "crop_mode", value: clip(mode) });
  }
  const interpolation = firstOf(pretrained.interpolation, "bicubic");
  if (!["bilinear", "bicubic"].includes(interpolation)) {
    refuse("bad value", { name: "interpolation", value: clip(interpolation) });
  }
  return {
    size: stated === undefined ? null : readSide(stated, "input_size"),
    resized: (side) => Math.floor(side / share),
    squeezed: mode === "squash",
    interpolation,
    mean: readColors(firstOf(pretrained.mean, [0.485, 0.456, 0.406]), "mean", isBounded),
    std: readColors(firstOf(pretrained.std, [0.229, 0.224, 0.225]), "std", isPositive),
    notes,
  };
}

// Names of classes from a list, or from names by number.
function readNames(value) {
  const list = isObject(value) ? Object.keys(value).map((_, number) => value[number]) : value;
  if (!Array.isArray(list) || !list.every((name) => typeof name === "string")) return null;
  return list;
}

// timm's description of a short name such as "n01440764", if there is one.
function describeName(name, descriptions) {
  const isDescribed = isObject(descriptions) && Object.hasOwn(descriptions, name);
  return isDescribed ? String(descriptions[name]) : name;
}

function readTimmClasses(config, pretrained) {
  const stated = readNames(
    firstOf(config.label_names, pretrained.label_names, config.labels, null),
  );
  const descriptions = firstOf(config.label_descriptions, pretrained.label_descriptions, null);
  const names = stated?.map((name) => describeName(name, descriptions)) ?? null;
  const tag = firstOf(pretrained.tag, config.architecture.split(".")[1], "");
  return { labels: names, imagenet: typeof tag === "string" && IMAGENET_TAG.test(tag) };
}

// What a transformers configuration says about the forward.
function readHub(config, processor, supply) {
  const [kind] = [config.architectures].flat();
  if (typeof kind !== "string" || !Object.hasOwn(HUB_MODELS, kind)) {
    refuse("unknown class", { name: clip(kind), names: Object.keys(HUB_MODELS).join(", ") });
  }
  if (config.auto_map) refuse("own code");
  const model = HUB_MODELS[kind];
  const isNested = isObject(config.vision_config);
  const own = isNested ? config.vision_config : config;
  const family = firstOf(TOWERS.get(config.model_type), config.model_type);
  if (family !== model.family) {
    refuse("two classes", { name: kind, type: clip(config.model_type), expected: model.family });
  }
  const defaults = KNOWN.configs[family];
  const settingOf = (name) => firstOf(own[name], defaults[name]);
  const activation = settingOf("hidden_act");
  if (typeof activation !== "string" || !Object.hasOwn(HUB_ACTIVATIONS, activation)) {
    refuse("unknown activation", { name: clip(activation) });
  }
  const bend = firstOf(own.pooler_act, "tanh");
  if (model.bends && bend !== "tanh") refuse("unknown activation", { name: clip(bend) });
  if (own.use_swiglu_ffn) refuse("unknown activation", { name: "SwiGLU" });
  const imageSize = readSide(settingOf("image_size"), "image_size");
  const names = [model.names].flat().find(({ positions }) => supply.has(positions));
  if (!names) refuse("missing tensor", { tensor: [model.names].flat()[0].positions });
  const registers = readCount(firstOf(own.num_register_tokens, 4), "num_register_tokens", 1024);
  return {
    ...model,
    library: "transformers",
    kind,
    heads: readCount(settingOf("num_attention_heads"), "num_attention_heads"),
    width: settingOf("hidden_size"),
    layers: settingOf("num_hidden_layers"),
    patch: readSide(settingOf("patch_size"), "patch_size"),
    eps: readEps(settingOf("layer_norm_eps")),
    activation: HUB_ACTIVATIONS[activation],
    special: Object.fromEntries(
      names.special.map((name) => [name, name.endsWith("register_tokens") ? registers : 1]),
    ),
    names,
    placesAll: false,
    qkvBias: firstOf(own.qkv_bias, true) !== false,
    projBias: true,
    embedBias: names.embedBias !== false,
    scaled: Boolean(names.block(0).scale1),
    hasNormPre: Boolean(names.normPre),
    hasNorm: Boolean(names.norm),
    hasNormPooled: false,
    classes: null,
    outputs: firstOf(config.outputs, OUTPUT_KINDS[config.problem_type]),
    imageSize,
    ...readHubPixels(processor, family, imageSize),
    ...readHubClasses(config),
  };
}

// Width and height to which transformers resizes, as {side, squeezed}.
function readHubSize(size, usual) {
  if (isObject(size) && "shortest_edge" in size) {
    return { side: readSide(size.shortest_edge, "size"), squeezed: false };
  }
  const squeezed = isObject(size) || !("shortest_edge" in usual);
  return { side: readSide(size, "size"), squeezed };
}

// The defaults of the preprocessing class that a file names, else of the class that belongs to the model.
function usualProcessor(processor, family) {
  const named = firstOf(processor?.image_processor_type, processor?.feature_extractor_type);
  if (named === undefined) return KNOWN.processors[KNOWN.processorOf[family]];
  const title = String(named).replace(/(ImageProcessor|FeatureExtractor)(Fast|Pil)?$/, "");
  if (!Object.hasOwn(KNOWN.processors, title)) {
    refuse("unknown processor", {
      name: clip(named),
      names: Object.keys(KNOWN.processors).join(", "),
    });
  }
  return KNOWN.processors[title];
}

// The sizes of a preprocessing that its file does not state: the library's if they fit the model, else the model's.
function usualSizes({ size, crop_size: crop }, imageSize) {
  const usual = firstOf(crop, size);
  if (firstOf(usual.height, usual.shortest_edge) === imageSize) return {};
  const isShortest = "shortest_edge" in size;
  return { size: isShortest ? { shortest_edge: imageSize } : imageSize, crop_size: imageSize };
}

// transformers' preprocessing, from preprocessor_config.json or the defaults of the model's library.
function readHubPixels(processor, family, imageSize) {
  const usual = usualProcessor(processor, family);
  const notes = [];
  let given = processor;
  if (!given) {
    given = usualSizes(usual, imageSize);
    notes.push(["no processor", { file: "preprocessor_config.json" }]);
  }
  const stepOf = (name) => firstOf(given[name], usual[name]);
  for (const name of ["do_resize", "do_rescale"]) {
    if (stepOf(name) !== true) refuse("bad value", { name, value: clip(stepOf(name)) });
  }
  const factor = stepOf("rescale_factor");
  if (!(Math.abs(factor * 255 - 1) < 1e-6)) {
    refuse("bad value", { name: "rescale_factor", value: clip(factor) });
  }
  const interpolation = INTERPOLATIONS.get(stepOf("resample"));
  if (!interpolation) refuse("bad value", { name: "resample", value: clip(stepOf("resample")) });
  const { side, squeezed } = readHubSize(stepOf("size"), usual.size);
  const crops = stepOf("do_center_crop") === true;
  if (!crops && !squeezed) refuse("not square", { name: "size", value: clip(stepOf("size")) });
  const cut = crops ? readSide(stepOf("crop_size"), "crop_size") : side;
  if (cut > side) refuse("bad value", { name: "crop_size", value: cut });
  const normalizes = stepOf("do_normalize") === true;
  const mean = normalizes ? stepOf("image_mean") : [0, 0, 0];
  const std = normalizes ? stepOf("image_std") : [1, 1, 1];
  return {
    size: cut,
    resized: (wanted) => (wanted === cut ? side : Math.round((wanted * side) / cut)),
    squeezed,
    interpolation,
    mean: readColors(mean, "image_mean", isBounded),
    std: readColors(std, "image_std", isPositive),
    notes,
  };
}

// LABEL_0, LABEL_1 … are no names.
function readHubClasses({ id2label }) {
  const names = isObject(id2label) ? readNames(id2label) : null;
  const isNumbered = names?.every((name, number) => name === `LABEL_${number}`);
  return { labels: isNumbered ? null : names, imagenet: false };
}

// What a configuration says, by the library that wrote it.
function readConfig(config, processor, supply) {
  if (typeof config.architecture === "string") return readTimm(config, supply);
  if (typeof config.model_type === "string") return readHub(config, processor, supply);
  return refuse("unknown config");
}

// Number of layers that the tensors have.
function countLayers(supply, names) {
  let layers = 0;
  while (supply.has(`${names.block(layers).norm1}.weight`)) layers += 1;
  return layers;
}

// Special tokens and positions: {tokens, places: table of positions, count: of special tokens, placed: those with a
// position, side: of the grid of the positions, named: names of the special tokens}. Registers of transformers have no
// positions.
function planTokens(supply, { names, width: D, special, placesAll, library }) {
  const isTimm = library === "timm";
  const present = names.special.filter((name) => special[name]);
  const tokens = present.map((name) => takeRows(supply, name, special[name], D));
  const count = sumOf(present.map((name) => special[name]));
  const withPlace = isTimm ? present : present.filter((name) => !name.endsWith("register_tokens"));
  const all = sumOf(withPlace.map((name) => special[name]));
  const placed = isTimm && !placesAll ? 0 : all;
  const places = supply.take(names.positions);
  const rows = countOf(places.shape) / D;
  const side = Math.sqrt(rows - placed);
  if (places.shape.at(-1) !== D || !Number.isInteger(side) || side < 1) {
    refuse("wrong shape", {
      tensor: names.positions,
      shape: shown(places.shape),
      expected: `1 × (n × n + ${placed}) × ${D}`,
    });
  }
  const named = present.flatMap((name) => specialNames(name, special[name]));
  return { tokens, places, count, placed, side, named };
}

// Names of the tokens of a tensor, as Python gives them.
function specialNames(name, count) {
  if (/reg/.test(name)) return Array.from({ length: count }, (_, k) => `register ${k + 1}`);
  return [/dist/.test(name) ? "distillation token" : "class token"];
}

// Tokens (count, D), whatever sides of 1 are before.
function takeRows(supply, name, count, D) {
  const tensor = supply.take(name);
  if (countOf(tensor.shape) !== count * D || tensor.shape.at(-1) !== D) {
    refuse("wrong shape", {
      tensor: name,
      shape: shown(tensor.shape),
      expected: `1 × ${count} × ${D}`,
    });
  }
  return tensor;
}

// Float32 numbers of several tensors one after another.
async function joinValues(tensors) {
  if (tensors.length === 1) return tensors[0].values();
  const joined = new Float32Array(sumOf(tensors.map(({ shape }) => countOf(shape))));
  let at = 0;
  for (const { shape, values } of tensors) {
    joined.set(await values(), at);
    at += countOf(shape);
  }
  return joined;
}

// Multiplies the rows of a matrix (or the values of a vector) by the factors of LayerScale, or halves all.
async function scaleRows(values, scale) {
  if (!scale) return values;
  const factors = await scale.values();
  const depth = values.length / factors.length;
  return values.map((value, i) => value * factors[Math.floor(i / depth)]);
}

// A linear layer (rows of all sources, depth) of vit.js. Biases are 0 if it is not `biased`.
function planLinear(supply, tensors, target, sources, { rows, depth, biased = true, scale = "" }) {
  const share = rows / sources.length;
  const factors = scale ? supply.take(scale, [rows]) : null;
  const weights = sources.map((source) => {
    const name = `${source}.weight`;
    const tensor = supply.take(name);
    const [own, ...others] = tensor.shape;
    if (own !== share || countOf(others) !== depth) {
      refuse("wrong shape", {
        tensor: clip(name),
        shape: shown(tensor.shape),
        expected: `${share} × ${depth}`,
      });
    }
    return tensor;
  });
  const biases = sources.map((source) => {
    if (biased) return supply.take(`${source}.bias`, [share]);
    return { shape: [share], values: () => new Float32Array(share) };
  });
  const scaled = async (parts) => scaleRows(await joinValues(parts), factors);
  tensors[`${target}.weight`] = { shape: [rows, depth], values: () => scaled(weights) };
  tensors[`${target}.bias`] = { shape: [rows], values: () => scaled(biases) };
}

function planNorm(supply, tensors, target, source, D) {
  for (const part of ["weight", "bias"]) {
    tensors[`${target}.${part}`] = supply.take(`${source}.${part}`, [D]);
  }
}

// The classifier of one or two read-outs: logits are averaged if there are two heads, and a head of 2·D inputs reads
// two vectors at once.
function planHead(supply, tensors, { names, reads, width: D }) {
  const [first] = names.heads;
  const [classes] = supply.shape(`${first}.weight`);
  readCount(classes, "num_classes", MOST_CLASSES);
  if (reads !== "two tokens") {
    const depth = reads === "token and patches" ? 2 * D : D;
    planLinear(supply, tensors, "head", [first], { rows: classes, depth });
    return classes;
  }
  const heads = names.heads.map((name) => {
    const parts = {};
    planLinear(supply, parts, "head", [name], { rows: classes, depth: D });
    return parts;
  });
  const [weight, bias] = ["head.weight", "head.bias"].map((name) =>
    heads.map((head) => head[name]),
  );
  tensors["head.weight"] = { shape: [classes, 2 * D], values: () => besideHalved(weight, D) };
  tensors["head.bias"] = { shape: [classes], values: () => besideHalved(bias, 1, true) };
  return classes;
}

// Two matrices (classes, D) beside each other, (classes, 2·D), each halved. `added`: their sum.
async function besideHalved([one, two], D, added = false) {
  const [first, second] = [await one.values(), await two.values()];
  if (added) return first.map((value, i) => (value + second[i]) / 2);
  const joined = new Float32Array(2 * first.length);
  for (let row = 0; row < first.length / D; row += 1) {
    for (let i = 0; i < D; i += 1) {
      joined[2 * row * D + i] = first[row * D + i] / 2;
      joined[(2 * row + 1) * D + i] = second[row * D + i] / 2;
    }
  }
  return joined;
}

// The linear layer that makes the output of a model without classes from what it reads, if the files have it.
function planPooled(supply, tensors, { pooled, width: D }) {
  const name = `${pooled}.weight`;
  if (!pooled || !supply.has(name)) return;
  const [rows] = supply.shape(name);
  readCount(rows, "projection_dim", 65536);
  planLinear(supply, tensors, "pooled", [pooled], {
    rows,
    depth: D,
    biased: supply.has(`${pooled}.bias`),
  });
}

// The side of the model's input: `size` if a person chose it, else that of the configuration, else that of the
// positions.
function sideOf(plan, size, built) {
  const side = firstOf(size, plan.size, plan.imageSize, built);
  readCount(side, "image size", 65536);
  if (side % plan.patch) refuse("cut patches", { size: side, patch: plan.patch });
  return side;
}

// Names of the classes: dropped ones, else those of the configuration, if their number is that of the classes.
function labelsOf({ labels }, classes, dropped) {
  if (dropped && dropped.length !== classes) {
    refuse("label count", { count: dropped.length, classes });
  }
  const names = firstOf(dropped, labels);
  return names?.length === classes ? names : null;
}

// Layers in the order in which they are computed.
function planLayers(supply, tensors, { names, width: D, layers, qkvBias, projBias, scaled }) {
  const [hidden = 0] = supply.shape(`${names.block(0).fc1}.weight`);
  for (let layer = 0; layer < layers; layer += 1) {
    const { norm1, qkv, proj, norm2, fc1, fc2, ...scales } = names.block(layer);
    const { scale1, scale2 } = scaled ? scales : {};
    planNorm(supply, tensors, `${layer}.norm1`, norm1, D);
    planLinear(supply, tensors, `${layer}.qkv`, qkv, { rows: 3 * D, depth: D, biased: qkvBias });
    planLinear(supply, tensors, `${layer}.proj`, [proj], {
      rows: D,
      depth: D,
      biased: projBias,
      scale: scale1,
    });
    planNorm(supply, tensors, `${layer}.norm2`, norm2, D);
    planLinear(supply, tensors, `${layer}.fc1`, [fc1], {
      rows: hidden,
      depth: D,
      biased: projBias,
    });
    planLinear(supply, tensors, `${layer}.fc2`, [fc2], {
      rows: D,
      depth: hidden,
      biased: projBias,
      scale: scale2,
    });
  }
  return hidden;
}

// The norms outside of the layers. A final norm is applied to all tokens, or to what the head reads.
function planNorms(supply, tensors, { names, width: D, hasNormPre, hasNorm, hasNormPooled }) {
  if (hasNormPre) planNorm(supply, tensors, "norm_pre", names.normPre, D);
  if (hasNorm) planNorm(supply, tensors, "norm", names.norm, D);
  if (hasNormPooled) planNorm(supply, tensors, "fc_norm", names.normPooled, D);
}

// Refuses sizes that the kernels do not compute.
function checkWidths({ heads, width: D, patch }, hidden) {
  const K = D / heads;
  if (D % heads) refuse("uneven heads", { heads, width: D });
  for (const width of [D, K, hidden]) {
    if (width % 8) refuse("odd width", { width });
  }
  readCount(patch, "patch_size", 1024);
}

// The forward of a checkpoint, from its configuration. options: {processor: preprocessor_config.json, size: side of
// the model's input, labels: dropped names}.
function describeModel(config, stored, { processor = null, size = null, labels = null } = {}) {
  const supply = new Supply(stored);
  const plan = readConfig(config, processor, supply);
  const { names } = plan;
  const tensors = {};
  const [D, channels, ...patch] = supply.shape(`${names.embed}.weight`);
  if (channels !== 3) refuse("not colors", { channels: clip(channels) });
  compare("width", plan.width, D);
  compare("patch size", `${plan.patch} × ${plan.patch}`, patch.join(" × "));
  compare("layers", plan.layers, countLayers(supply, names));
  const { tokens, places, count, placed, side: built, named } = planTokens(supply, plan);
  const side = sideOf(plan, size, built * plan.patch);
  const grid = side / plan.patch;
  if (grid ** 2 > PATCHES_LIMIT) refuse("many patches", { patches: grid ** 2 });
  planLinear(supply, tensors, "embed", [names.embed], {
    rows: D,
    depth: 3 * plan.patch ** 2,
    biased: plan.embedBias,
  });
  const hidden = planLayers(supply, tensors, plan);
  planNorms(supply, tensors, plan);
  const classes = plan.classifies ? planHead(supply, tensors, plan) : 0;
  planPooled(supply, tensors, plan);
  if (firstOf(plan.classes, classes) !== classes) compare("classes", plan.classes, classes);
  supply.leave(names.unused);
  supply.finish();
  checkWidths(plan, hidden);
  if (plan.reads === "token" && !plan.special[names.special[0]]) {
    refuse("missing tensor", { tensor: names.special[0] });
  }
  const positions = readOnce(places);
  const moved = { from: built, to: grid, smooth: Boolean(plan.smooth), D, placed };
  tensors.prefix = {
    shape: [count, D],
    values: () => prefixValues(tokens, positions, moved, count),
  };
  tensors.positions = { shape: [grid ** 2, D], values: () => patchPositions(positions, moved) };
  const notes = [...plan.notes];
  if (grid !== built) {
    notes.push(["resized positions", { from: built, to: grid, library: plan.library }]);
  }
  if (supply.unused.length) {
    const listed = supply.unused.slice(0, 3).map(clip).join(", ");
    notes.push(["unused tensors", { count: supply.unused.length, names: listed }]);
  }
  const form = { patch: [plan.patch, plan.patch], prefix: count, reads: plan.reads };
  const about = {
    ...form,
    ...describeSize(form, [side, side]),
    layers: plan.layers,
    heads: plan.heads,
    scale: (D / plan.heads) ** -0.5,
    width: D,
    hidden,
    classes,
    outputs: outputsOf(plan.outputs, classes),
    special: named,
    stretches: plan.library === "timm", // positions can be resized to other grids
    smooth: moved.smooth,
    eps: plan.eps,
    activation: plan.activation,
    bends: Boolean(plan.bends && tensors["pooled.weight"]),
    interpolation: plan.interpolation,
    mean: plan.mean,
    std: plan.std,
    resized: plan.resized(side),
    squeezed: plan.squeezed,
  };
  return {
    about,
    tensors,
    notes,
    labels: labelsOf(plan, classes, labels),
    imagenet: plan.imagenet && classes === 1000,
    title: typeof config.title === "string" ? clip(config.title) : null,
    architecture: plan.architecture && clip(plan.architecture),
    kind: plan.kind,
  };
}

// What the outputs mean, as `vitlens.models.output_kind`.
function outputsOf(stated, classes) {
  if (["classes", "independent", "value"].includes(stated)) return stated;
  return classes === 1 ? "value" : "classes";
}

// A tensor whose values are read once and kept for its second use.
function readOnce({ values }) {
  let held = null;
  return () => (held ||= values());
}

// Special tokens (R, D) with the positions of those that have one.
async function prefixValues(tokens, positions, { D, placed }) {
  const joined = await joinValues(tokens);
  const places = await positions();
  for (let i = 0; i < placed * D; i += 1) joined[i] += places[i];
  return joined;
}

// Positions of the patches, resized if the grid is another.
async function patchPositions(positions, { from, to, smooth, D, placed }) {
  const places = (await positions()).subarray(placed * D);
  if (from === to) return places.slice();
  return resizePositions(places, D, [from, from], [to, to], smooth);
}

// Names of classes from a text file with a name a line.
async function readLabels(file) {
  const name = clip(file.name);
  if (file.size > LONGEST_JSON) refuse("long JSON", { file: name });
  const lines = (await file.text()).split(/\r?\n/).map((line) => line.trim());
  return lines.filter((line, i) => line || i < lines.length - 1);
}

// Opens dropped files: {about, tensors, notes, labels, imagenet, title: from config.json, architecture: in timm,
// kind: class in transformers}. `size`: side of the model's input, if chosen.
export async function openFiles(files, size = null) {
  const byName = (name) => files.find((file) => file.name === name);
  const stored = await readCheckpoint(files);
  const configFile = byName("config.json");
  if (!configFile) refuse("no config");
  const processorFile = byName("preprocessor_config.json");
  const text = files.find((file) => file.name.endsWith(".txt"));
  const processor = processorFile ? await readJson(processorFile) : null;
  const labels = text ? await readLabels(text) : null;
  return describeModel(await readJson(configFile), stored, { processor, size, labels });
}
