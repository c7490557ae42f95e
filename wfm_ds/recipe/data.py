"""Schema of the recipe section `data`: training data, how it is processed, and caches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PositiveFloat, PositiveInt, Tag, model_validator

from wfm_ds.recipe.actions import ActionsRecipe, Domain, Viewpoint
from wfm_ds.recipe.section import Decay, Fraction, Section, UserAddress, UserClass, UserPath, value_form
from wfm_ds.types import CONTROL, IMAGE_INPUTS, MASK, SOURCES, VIDEO_INPUTS
from wfm_ds.user_class import is_user_class

BucketSize = tuple[PositiveInt, PositiveInt]
MediaInput = Literal["source", "source_2", "source_3", "mask", "control", "control_mask"]
IMAGE_INPUT_KINDS = ("paired", "folder", "webdataset", "hf", "pairs")  # kinds that can have images as data.inputs
VIDEO_INPUT_KINDS = ("paired", "folder", "webdataset", "pairs")  # kinds that can have videos as data.inputs
INPUT_KINDS = ("paired", "folder", "webdataset", "lerobot")  # kinds of captioned videos that can have data.inputs
EpisodeSlice = Annotated[str, Field(pattern=r"^(-?[0-9]+)?:(-?[0-9]+)?$")]
"""A Python slice of the list of episodes: `0:-500` selects all except the last 500."""
Views = Annotated[list[Annotated[list[str], Field(min_length=1)]], Field(min_length=1)]


class DataSetRecipe(Section):
    """One of the data sets that `data.kind: sets` mixes."""

    path: UserAddress
    """Like `data.path`. Relative paths of folders are relative to `data.path`."""
    weight: PositiveFloat = 1.0
    """Relative sampling weight."""
    kind: Literal["folder", "hf", "paired", "cosmos", "webdataset", "lerobot"] = "folder"
    """Like `data.kind`."""
    name: Annotated[str, Field(pattern=r"^[^/#\s]+$")] | None = None
    """Prefix of the sample ids. Unset: the last component of `path`."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """Like `data.prompt`."""
    caption_column: str | None = None
    """Like `data.caption_column`."""
    image_column: str | None = None
    """Like `data.image_column`."""
    input_folders: dict[MediaInput, UserPath] = Field(default_factory=dict)
    """Like `data.input_folders`, relative to `path`."""
    input_columns: dict[MediaInput, str] = Field(default_factory=dict)
    """Like `data.input_columns`."""
    split: str = "train"
    """Split of the data set. Only for `kind: hf`."""
    views: Views | None = None
    """Like `data.views`."""
    episodes: EpisodeSlice | None = None
    """Like `data.episodes`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Like `data.options`, for `hf` and `lerobot`."""
    actions: ActionsRecipe | None = None
    """Like `data.actions`. Unset: the values of `data.actions`."""
    domain: Domain | None = None
    """Like `data.domain`. Unset: the value of `data.domain`."""
    viewpoint: Viewpoint | None = None
    """Like `data.viewpoint`. Unset: the value of `data.viewpoint`."""


class PixelsRecipe(Section):
    """Smallest and largest image size for a vision-language model, in pixels per image."""

    min: PositiveInt = 3136
    """Images with fewer pixels are enlarged to this number of pixels."""
    max: PositiveInt = 1003520
    """Images and video frames with more pixels are reduced to this number of pixels."""

    @model_validator(mode="after")
    def _check_bounds(self) -> PixelsRecipe:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}: raise max")
        return self


class VideoRecipe(Section):
    """Sampling of frames from videos for a vision-language model."""

    fps: PositiveFloat = 1.0
    """Frames sampled per second."""
    max_frames: Annotated[int, Field(ge=2)] = 768
    """Maximum number of frames. Longer videos are sampled at a lower frame rate."""
    total_pixels: Literal["auto"] | PositiveInt = "auto"
    """Maximum number of pixels over all frames of a video. `auto`: as many pixels as 0.9 * `data.max_tokens` tokens
    represent."""


class DataRecipe(Section):
    """Training data: captioned images or videos (SFT, RL), preference pairs (DPO), prompts (RL) or conversations
    (vlm_sft). If the description of a key starts with values of `kind`, such as `hf:`, the key is only for these
    kinds."""

    kind: (
        Literal["folder", "hf", "paired", "cosmos", "webdataset", "lerobot", "sets", "pairs", "prompts", "llava"]
        | UserClass
    )
    """Format of the data. Most formats contain captioned images or videos, for SFT and for RL with ddrl or conditioning
    frames. `folder`: any layout of docs/data_layouts.md, detected automatically. `paired`: NAME.png or NAME.mp4, with
    the caption in NAME.txt or in `prompt` of NAME.json. `cosmos`: videos/NAME.mp4, with the caption in metas/NAME.txt.
    `webdataset`: tar shards. `hf`: a data set of the datasets library, from the Hub or a folder. `lerobot`: recorded
    episodes of robots (docs/robots.md). `sets`: a weighted mix of these formats. `package.module:Class`: your own
    reader. Three formats have other contents. `prompts`: a set of prompts for RL. `pairs`: preference pairs for DPO, in
    a .jsonl file with `prompt`, `chosen` and `rejected`, or in tar shards. `llava`: conversations about images and
    videos for vlm_sft (docs/reasoner.md)."""
    path: Annotated[
        Annotated[UserAddress, Tag("scalar")] | Annotated[list[UserAddress], Field(min_length=1), Tag("list")],
        Discriminator(value_form),
    ]
    """Location of the data: usually a folder. sets: the folder to which relative paths in `sets` are relative. hf:
    `owner/name` on the Hub or a folder. lerobot: `owner/name`, a folder or an s3:// folder; all data sets below a
    folder are read together. webdataset: tar files (a path, a glob, a range {000..123} or a list of these), local or
    s3://. pairs: tar files as for webdataset, or a .jsonl file. llava: annotations (a .json or .jsonl file, a folder or
    a list of these; s3:// folders end with a slash)."""
    sets: Annotated[list[DataSetRecipe], Field(min_length=1)] | None = None
    """sets: the data sets to mix, sampled in proportion to their weights (docs/data_layouts.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Your own kind: keyword arguments of the class. hf: keyword arguments of load_dataset, such as `name` and
    `revision`. lerobot: `revision`, a branch, tag or commit on the Hub."""
    views: Views | None = None
    """lerobot: cameras to show, in rows from top to bottom. `[[wrist], [left, right]]` shows the cameras left and right
    with half the size below the camera wrist. Unset: the only camera of the data set."""
    episodes: EpisodeSlice | None = None
    """lerobot: episodes to use, as a Python slice of the list of episodes: `0:-500` uses all except the last 500.
    Unset: all."""
    streaming: bool = False
    """hf, SFT only: stream the rows in stored order instead of writing them to disk first (docs/data_processing.md).
    Needs `shuffle: false` and, for Hub data sets, a commit in `options.revision`."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """folder, lerobot: caption for images, videos and episodes that have none. Unset: samples without a caption are
    invalid."""
    caption_column: str | None = None
    """folder, hf: column with the captions. Unset: the first of `text`, `prompt` and `caption` that exists."""
    image_column: str | None = None
    """folder, hf: column with the images or videos. Unset: in tables, the first of `file_name`, `file`, `image_path`,
    `video_path` and `image` that exists; in data sets of the datasets library, the only column with images or
    videos that is not an input."""
    name: str = "prompts"
    """prompts: name of the prompt set, which selects its format (pickscore, ocr, geneval, dance_grpo_t2v, or any other
    name)."""
    split: str = "train"
    """hf: the split. prompts: read SPLIT.txt or SPLIT.jsonl (geneval: SPLIT_metadata.jsonl or SPLIT.jsonl)."""
    caption_dropout: Fraction = 0.0
    """SFT and DPO: probability of replacing a caption by the empty prompt, for classifier-free guidance."""
    max_bad_fraction: Fraction = 0.05
    """Maximum fraction of invalid samples. Invalid samples are skipped and counted; above this fraction the run exits
    with code 2."""
    shuffle: bool = True
    """Shuffle the samples in every epoch, with an order derived from `run.seed`."""
    choose: Literal["even", "reward_std"] = "even"
    """prompts: how prompts are chosen. `even`: each prompt once per epoch. `reward_std`: prompts with a larger reward
    std are chosen more often. Use it for prompt sets that a run repeats many times (docs/prompts.md)."""
    choose_floor: Annotated[float, Field(gt=0, le=1)] = 0.14
    """With `choose: reward_std`: sampling weight of a prompt whose samples all have the same reward, relative to the
    prompt with the largest reward std. 1: all prompts are equally likely."""
    choose_memory: Decay = 0.6
    """With `choose: reward_std`: decay of the moving average of a prompt's reward variance. Each group of the prompt is
    one update."""
    fps: PositiveFloat | None = None
    """Videos: frame rate at which clips are sampled. Unset: consecutive frames at the frame rate of the file."""
    allow_repeats: bool = False
    """True: repeat frames of videos with a frame rate below `fps`. False: skip such videos and count them as
    low_fps."""
    clip: Literal["random", "centre"] = "random"
    """Temporal position of the clip in a video. `random`: a random position in each epoch. `centre`: the middle."""
    crop: Literal["centre", "random"] = "centre"
    """Position of the crop if the aspect ratio of an image or video differs from that of the sample size. `centre`: the
    centre. `random`: a random position in each epoch."""
    video_resize: Literal["pillow", "swscale"] = "pillow"
    """Library that resizes video frames. `swscale`: four to five times as many clips per second of a CPU core, with
    slightly different pixels (docs/data_processing.md). Images are always resized by Pillow."""
    buckets: (
        Annotated[
            Annotated[Literal["auto"], Tag("scalar")] | Annotated[list[BucketSize], Field(min_length=1), Tag("list")],
            Discriminator(value_form),
        ]
        | None
    ) = None
    """Aspect-ratio buckets, each [height, width]. Images and videos are resized to the nearest shape; a
    micro-batch (RL: an RL step) has one size. `auto`: `sampling.height` x `sampling.width` and common shapes from 2:1
    to 1:2 with about the same number of pixels. Unset: everything is cropped to `sampling.height` x
    `sampling.width`."""
    max_upscale: Annotated[float, Field(ge=1)] = 2.0
    """Maximum factor by which images and videos are enlarged. Images and videos that need a larger factor are skipped
    and counted as too_small."""
    inputs: list[str] = Field(default_factory=list)
    """Conditioning inputs in addition to text and frames, such as `[actions]`: keys of NAME.json with a number, a list
    of numbers or the name of an .npy file in the same folder (docs/inputs.md). `[source]`: the image to edit, a key
    with the name of an image file; `source_2` and `source_3` are further images. `[control]`: the control video of Wan
    VACE, a key with the name of a video file; `control_mask` is a video that is white where the model generates. All
    samples must have them, and the model must support them."""
    reward_inputs: list[Literal["mask"]] = Field(default_factory=list)
    """Images that only the rewards see. `[mask]`: white where an edit may change the source (docs/rewards.md). Masks
    are stored, resized and cropped like sources."""
    input_folders: dict[MediaInput, UserPath] = Field(default_factory=dict)
    """folder, paired: folders of the input images and videos, such as `{source: before}`. An input file has the same
    relative path as its target, with any suffix of an image or video. Relative folders are relative to `data.path` (for
    `validation.path`, to that folder). Unset: see docs/data_layouts.md."""
    input_columns: dict[MediaInput, str] = Field(default_factory=dict)
    """folder, hf: columns of the input images and videos, such as `{source: original_image}`. Unset: the columns have
    the names of the inputs."""
    source_size: Annotated[
        Annotated[Literal["target", "stock"], Tag("scalar")] | Annotated[BucketSize, Tag("list")],
        Discriminator(value_form),
    ] = "target"
    """Size of source images, which are resized and cropped to it. `target`: the size of the sample. `stock`: the size
    to which the diffusers pipeline resizes a source of the size of the sample. Or [height, width]."""
    target: bool = True
    """RL with `inputs: [source]`: whether the data contains edited images. False: the images of the data are the
    sources, and the model learns from its own edits and their rewards alone. With `inputs: [control]`, False means that
    the videos of the data are the control videos."""
    actions: ActionsRecipe = ActionsRecipe()
    """How actions are computed, normalized and combined."""
    domain: Domain | None = None
    """Input `domain` of all samples: the name of a robot that Cosmos3 knows, such as `droid_lerobot`, or its number
    (docs/robots.md). Unset: the value in NAME.json."""
    viewpoint: Viewpoint | None = None
    """Cosmos3 with actions: the camera view that is added to captions, such as `wrist_view`, or a sentence that
    describes it (docs/robots.md). Unset: `ego_view`."""
    workers: Annotated[int, Field(ge=1, le=256)] = 2
    """Threads per rank that read and decode samples in advance."""
    allow_pickle: bool = False
    """cosmos: also read text embeddings from pickle files. The unpickler only builds numpy arrays."""
    cache_dir: UserPath | None = None
    """Folder for cached text embeddings, latents, tar indexes and conversation lengths. Several runs can share it.
    Unset: no cache, except for text embeddings (see `cache_text`)."""
    cache_text: Literal["auto", "off"] = "auto"
    """`auto`: before training, encode all texts into `cache_dir` (if it is unset, into $WFM_CACHE or ~/.cache/wfm_ds),
    then free the text encoders. The encoders stay loaded if the embeddings would exceed 64 GiB, or if the number of
    samples that the run draws is below half the number of texts (docs/data_processing.md). `off`: encode each text when
    it is first needed."""
    cache_latents: bool = False
    """Cache the latents of all training images and videos in `cache_dir`. Needs `clip: centre` and `crop: centre`."""

    media_path: UserAddress | None = None
    """llava: local or s3:// folder to which image and video paths in the annotations are relative. Unset: the
    annotations contain absolute paths or URLs."""
    system_prompt: str | None = None
    """llava: system prompt of conversations without one. Unset: whatever the model's chat template inserts."""
    max_tokens: Annotated[int, Field(ge=16)] = 4096
    """llava: Packed sequences and single conversations have at most this many tokens. `too_long` says what happens to
    longer conversations."""
    too_long: Literal["skip", "truncate_answer"] = "skip"
    """For `llava`: treatment of conversations longer than `max_tokens`. `skip`: skip and count them. `truncate_answer`:
    truncate them at the end, which shortens the last answer. Images and videos are never truncated."""
    pack: bool = True
    """llava: pack several conversations into one sequence. They do not attend to each other."""
    pixels: PixelsRecipe = PixelsRecipe()
    """llava: smallest and largest image size, in pixels per image."""
    video: VideoRecipe = VideoRecipe()
    """llava: how frames are sampled from videos."""

    @property
    def folder(self) -> Path:
        """`path` as a folder, for data kinds that read a single folder."""
        assert isinstance(self.path, str)
        return Path(self.path)

    @property
    def shard_patterns(self) -> list[str]:
        """`path` as a list of paths or patterns, for data kinds that accept several paths."""
        return [self.path] if isinstance(self.path, str) else list(self.path)

    def set_recipes(self) -> dict[str, tuple[DataRecipe, float]]:
        """Return {name: (recipe, weight)} of the data sets of `kind: sets`. For other kinds, return {}.

        Raises ValueError for duplicate names, and for keys that do not fit a data set's kind.
        """
        recipes: dict[str, tuple[DataRecipe, float]] = {}
        for one in self.sets or ():
            name = one.name or one.path.rstrip("/").rpartition("/")[2]
            if name in recipes:
                raise ValueError(f"two sets are called {name}: rename one of them")
            is_named = one.kind == "hf" or (one.kind == "lerobot" and not os.path.isdir(self.folder / one.path))
            path = one.path if "://" in one.path or is_named else str(self.folder / one.path)
            keys = one.model_dump(exclude={"path", "weight", "name", "actions", "domain", "viewpoint"})
            shared = self.model_dump(include={"max_bad_fraction", "cache_dir"})
            if one.kind in IMAGE_INPUT_KINDS:
                shared |= {key: getattr(self, key) for key in ("reward_inputs", "source_size", "target")}
            shared["inputs"] = self.inputs
            if one.kind in INPUT_KINDS:
                for key in ("actions", "domain", "viewpoint"):
                    own = getattr(one, key)
                    shared[key] = getattr(self, key) if own is None else own
                if one.actions is None and one.kind != "lerobot":  # stored actions have no features
                    shared["actions"] = self.actions.model_copy(update={"space": None})
            recipes[name] = (DataRecipe(path=path, **keys, **shared), one.weight)
        return recipes

    @property
    def image_inputs(self) -> list[str]:
        """Names of the inputs that are images, for the model or only for the rewards."""
        return [*(name for name in self.inputs if name in SOURCES), *self.reward_inputs]

    @property
    def video_inputs(self) -> list[str]:
        return [name for name in self.inputs if name in VIDEO_INPUTS]

    @property
    def media_inputs(self) -> list[str]:
        """Names of the inputs that are images or videos."""
        return [*self.video_inputs, *self.image_inputs]

    @property
    def is_user_kind(self) -> bool:
        return is_user_class(self.kind)

    @model_validator(mode="after")
    def _check_kind(self) -> DataRecipe:
        if self.options and not self.is_user_kind and self.kind not in ("hf", "lerobot"):
            raise ValueError(
                f"options is only for kind hf, lerobot or package.module:Class, not {self.kind}: remove it"
            )
        if self.kind == "lerobot" and self.options.keys() - {"revision"}:
            raise ValueError(f"options of kind lerobot has only the key revision, not {', '.join(self.options)}")
        if self.kind == "lerobot" and not isinstance(self.options.get("revision", ""), str):
            raise ValueError("options.revision must be text: put it in quotes")
        if "streaming" in self.options and self.kind == "hf":
            raise ValueError("options.streaming: use the key data.streaming instead")
        self._check_streaming()
        if (self.kind == "sets") != (self.sets is not None):
            raise ValueError("kind sets and the key sets belong together: set both, or neither")
        self.set_recipes()
        if self.kind not in ("folder", "lerobot"):
            self.require_defaults("prompt", unless="kind: folder or lerobot")
        if self.kind != "lerobot":
            self.require_defaults("views", "episodes", unless="kind: lerobot")
        if self.kind not in ("folder", "hf"):
            self.require_defaults("caption_column", "image_column", unless="kind: folder or hf")
        many = self.kind in ("webdataset", "pairs", "llava") or self.is_user_kind
        if not many and (not isinstance(self.path, str) or ("://" in self.path and self.kind != "lerobot")):
            raise ValueError(f"kind {self.kind} reads one local folder: lists and URLs are for webdataset and pairs")
        addresses = (*self.shard_patterns, self.media_path or "")
        if self.kind == "llava" and any("://" in a and not a.startswith("s3://") for a in addresses):
            raise ValueError("kind llava reads local or s3:// annotations and media: change path or media_path")
        if self.kind == "pairs" and (len(self.shard_patterns) > 1 or "://" in self.shard_patterns[0]):
            tables = [path for path in self.shard_patterns if path.lower().endswith(".jsonl")]
            if tables:
                raise ValueError(f"kind pairs reads one local .jsonl file, or tar shards: {tables[0]}")
        if self.allow_pickle and self.kind not in ("cosmos", "folder"):
            raise ValueError(f"allow_pickle is for the embeddings of kind cosmos, not {self.kind}: remove it")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("prompt is blank: set a caption, or remove it")
        self._check_inputs()
        if "actions" not in self.inputs:
            self.require_defaults("actions", "viewpoint", unless="inputs: [actions]")
        if self.actions.space is not None and self.kind not in ("lerobot", "sets") and not self.is_user_kind:
            raise ValueError(f"actions.space is for kind lerobot or sets, not {self.kind}: remove it")
        if self.kind == "lerobot" and "domain" in self.inputs and self.domain is None:
            raise ValueError("inputs: episodes of kind lerobot have no domain: set data.domain")
        if "domain" not in self.inputs:
            self.require_defaults("domain", unless="inputs: [actions, domain]")
        if isinstance(self.buckets, list) and len(set(self.buckets)) < len(self.buckets):
            raise ValueError(f"buckets has a duplicate size: {[list(size) for size in self.buckets]}")
        if self.choose == "even":
            self.require_defaults("choose_floor", "choose_memory", unless="choose: reward_std")
        else:
            self.require_defaults("shuffle", unless="choose: even, since reward_std samples at random")
        if self.cache_latents and (self.cache_dir is None or "random" in (self.clip, self.crop)):
            raise ValueError("cache_latents needs cache_dir, clip: centre and crop: centre")
        return self

    def _check_inputs(self) -> None:
        kinds = IMAGE_INPUT_KINDS if set(self.inputs) <= IMAGE_INPUTS else INPUT_KINDS
        kinds = VIDEO_INPUT_KINDS if self.video_inputs else kinds
        if self.inputs and not (self.kind in (*kinds, "sets") or self.is_user_kind):
            raise ValueError(f"inputs is for kind {', '.join(kinds)} or sets, not {self.kind}: remove it")
        if len(set(self.inputs)) < len(self.inputs):
            raise ValueError(f"inputs has duplicates: {self.inputs}")
        if MASK in self.inputs:
            raise ValueError(f"inputs: no model has the input {MASK}: move it to reward_inputs")
        if "source" not in self.inputs:
            self.require_defaults("reward_inputs", "source_size", unless="inputs: [source]")
        if not {"source", CONTROL} & set(self.inputs):
            self.require_defaults("target", unless="inputs: [source] or [control]")
        for key, other in (("input_folders", "paired"), ("input_columns", "hf")):
            if self.kind not in ("folder", other):
                self.require_defaults(key, unless=f"kind: folder or {other}")
            if unknown := [name for name in getattr(self, key) if name not in self.media_inputs]:
                raise ValueError(f"{key} has {unknown[0]}, which is not in inputs or reward_inputs: add or remove it")

    def _check_streaming(self) -> None:
        if not self.streaming:
            return
        if self.kind != "hf":
            raise ValueError(f"streaming is for kind hf, not {self.kind}: remove it")
        if self.shuffle:
            raise ValueError("streaming reads rows in stored order: set shuffle: false, or remove streaming")
        if self.buckets is not None:
            raise ValueError("buckets needs all sizes in advance, which streaming does not provide: remove one of them")
        if self.cache_latents:
            raise ValueError("cache_latents reads samples twice, which streaming cannot: remove one of them")
