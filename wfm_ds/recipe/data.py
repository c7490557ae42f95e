"""The recipe's `data` section."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from wfm_ds.recipe.section import Decay, Fraction, Section, UserAddress, UserClass, UserPath
from wfm_ds.user_class import is_user_class


class DataSetRecipe(Section):
    """One of several data sets."""

    path: UserAddress
    """As data.path of its kind; one that is relative is below data.path."""
    weight: PositiveFloat = 1.0
    """Its share of the draws, relative to the weights of the others."""
    kind: Literal["folder", "hf", "paired", "cosmos", "webdataset"] = "folder"
    """As data.kind."""
    name: Annotated[str, Field(pattern=r"^[^/#\s]+$")] | None = None
    """What its ids begin with. Unset: the last name in path."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """As data.prompt."""
    caption_column: str | None = None
    """As data.caption_column."""
    image_column: str | None = None
    """As data.image_column."""
    split: str = "train"
    """hf: the split."""


class PixelsRecipe(Section):
    """Sizes of images for a vision-language model."""

    min: PositiveInt = 3136
    """Smaller images are enlarged to this many pixels."""
    max: PositiveInt = 1003520
    """Larger images, and frames of videos, are reduced to this many."""

    @model_validator(mode="after")
    def _ordered(self) -> PixelsRecipe:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}: raise max")
        return self


class VideoRecipe(Section):
    """The frames of videos for a vision-language model."""

    fps: PositiveFloat = 1.0
    """Frames a second that are taken from a video."""
    max_frames: Annotated[int, Field(ge=2)] = 768
    """At most this many, further apart in longer videos."""
    total_pixels: Literal["auto"] | PositiveInt = "auto"
    """Pixels of all frames together. `auto`: as many as fill 0.9 of `max_tokens` if each were a token of its own."""


class ActionsRecipe(Section):
    """The actions that `data.inputs` names."""

    width: PositiveInt | None = None
    """Numbers of an action; samples with others are bad. Unset: those of `stats`, else of most of the first samples."""
    stats: UserPath | None = None
    """A JSON object with lists of a number for each of an action's: `q01` and `q99`, or `mean` and `std`."""
    normalize: Literal["none", "quantile", "meanstd"] = "none"
    """`quantile` takes q01 to -1 and q99 to 1, `meanstd` subtracts the mean and divides by std; a number that never
    changes becomes 0. The model and the rewards get the result."""
    compose: Literal["sum", "pose"] | None = None
    """How the actions between two frames of a clip become one, where data.fps is below the file's: `sum`, or `pose` for
    relative poses of 9 numbers (translation, two columns of the rotation), each in the frame of the one before. Unset:
    such clips are bad."""

    @model_validator(mode="after")
    def _stats_are_used(self) -> ActionsRecipe:
        if (self.stats is None) != (self.normalize == "none"):
            raise ValueError("stats and normalize belong together: name both, or neither")
        return self


class DataRecipe(Section):
    """Training data: media with captions (SFT, RL), pairs of them (DPO), prompts (RL), or conversations (vlm_sft)."""

    kind: Literal["folder", "hf", "paired", "cosmos", "webdataset", "sets", "pairs", "prompts", "llava"] | UserClass
    """SFT: `folder`, whichever of the layouts of docs/data.md a folder has; `paired`, NAME.txt, or NAME.json with
    `prompt`, beside NAME.png or NAME.mp4; `cosmos`, metas/NAME.txt and videos/NAME.mp4; `webdataset`, tar shards;
    `hf`, a data set of the library datasets, by its id on the Hugging Face hub or on disk; `sets`, several of these
    with weights; `package.module:Class`, captioned media that a class of your own finds (docs/data.md). DPO: `pairs`, a
    .jsonl file with `prompt`, `chosen` and `rejected`, or tar shards. RL: `prompts`, a prompt set; ddrl, and others
    whose samples are given frames, any but pairs or llava. vlm_sft: `llava`, conversations about images and videos
    (docs/reasoner.md)."""
    path: UserAddress | Annotated[list[UserAddress], Field(min_length=1)]
    """The folder; sets: the one that relative paths of its sets are below. hf: owner/name, or a folder. webdataset: a
    tar file, a glob or a range ({000..123}) of them, or a list of these; local or s3://. pairs: the same, or a .jsonl
    file. llava: the annotations, a .json or .jsonl file, a folder (of s3://, with a slash at its end) or a list."""
    sets: Annotated[list[DataSetRecipe], Field(min_length=1)] | None = None
    """sets: the data sets that are drawn from, each in the share of its weight (docs/data.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """A kind of your own: passed to its constructor. hf: passed to load_dataset, e.g. `name` and `revision`."""
    streaming: bool = False
    """hf, SFT: read the rows in their order from where they are, instead of writing all to disk once (docs/data.md).
    Needs shuffle: false, and a commit in options.revision of a data set of the hub."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """folder: the caption of all media that have none beside them. Unset: such media cannot be used."""
    caption_column: str | None = None
    """folder, hf: the column of a table or a data set that has the captions. Unset: `text`, `prompt` or
    `caption`, whichever is there first."""
    image_column: str | None = None
    """folder, hf: the column of a data set of the library datasets that has the images or videos. Unset: the only
    one."""
    name: str = "prompts"
    """prompts: name of the set, which decides its format (pickscore, ocr, geneval, dance_grpo_t2v, or any other)."""
    split: str = "train"
    """hf: the split. prompts: the file is SPLIT.txt or SPLIT.jsonl (geneval: SPLIT_metadata.jsonl or SPLIT.jsonl)."""
    caption_dropout: Fraction = 0.0
    """SFT and DPO: share of samples trained on the empty prompt, so that guidance works."""
    max_bad_fraction: Fraction = 0.05
    """Bad files are skipped and counted; above this share the run stops with exit code 2."""
    shuffle: bool = True
    """Draw samples in an order derived from run.seed, another one each epoch."""
    choose: Literal["even", "spread"] = "even"
    """prompts: `even` asks each prompt once an epoch. `spread` draws more often those whose samples are rewarded most
    differently, from which there is most to learn (docs/data.md): for sets whose prompts come again and again."""
    choose_floor: Annotated[float, Field(gt=0, le=1)] = 0.14
    """choose: spread: how often a prompt is drawn whose samples are all rewarded alike, relative to the prompt with the
    largest spread. 1 draws all equally often."""
    choose_memory: Decay = 0.6
    """choose: spread: the share of its old value that a prompt's running variance keeps when a group is rewarded."""
    fps: PositiveFloat | None = None
    """Videos: frames a second of the clips that are cut out. Unset: successive frames, whatever their rate."""
    allow_repeats: bool = False
    """Train on videos slower than `fps` by repeating frames; else they are skipped and counted as low_fps."""
    clip: Literal["random", "centre"] = "random"
    """Where in a video its clip lies: at random, elsewhere each epoch, or in the middle."""
    crop: Literal["centre", "random"] = "centre"
    """Which part of media with another aspect ratio is kept: the middle, or another one each epoch."""
    buckets: Literal["auto"] | Annotated[list[tuple[PositiveInt, PositiveInt]], Field(min_length=1)] | None = None
    """Train media at several sizes, [height, width] each: a medium is cut to the one nearest to its own shape, and a
    micro-batch (RL: an RL step) has one of them. `auto`: sampling.height x width and about as many pixels in the
    usual shapes from 2:1 to 1:2. Unset: all are cut to sampling.height x width."""
    max_upscale: Annotated[float, Field(ge=1)] = 2.0
    """Media that must be enlarged more than this to cover their size are skipped and counted as too_small."""
    inputs: list[str] = Field(default_factory=list)
    """What samples are told besides text and frames, such as `[actions]`: keys of NAME.json, a number, a list of
    numbers or the name of an .npy file beside it (docs/data.md). Every sample must have them, and the model take them.
    """
    actions: ActionsRecipe = ActionsRecipe()
    """Actions: their width, scale and composition."""
    workers: Annotated[int, Field(ge=1, le=256)] = 2
    """Threads of each rank that read and decode ahead."""
    allow_pickle: bool = False
    """cosmos: also read text embeddings from pickles, of which nothing but numpy arrays is ever built."""
    cache_dir: UserPath | None = None
    """A folder for what is computed once for all runs: text embeddings, latents, indices of tar shards, lengths of
    conversations. Unset: none, but for text embeddings, which `cache_text: auto` keeps in the user's cache."""
    cache_text: Literal["auto", "off"] = "auto"
    """`auto`: encode all texts of the run before it trains, in cache_dir or $WFM_CACHE (~/.cache/wfm_ds), and then
    remove the text encoders from memory; they stay if the embeddings would take more than 64 GiB (docs/data.md). `off`:
    encode a text when it is needed first."""
    cache_latents: bool = False
    """Keep the latents of all training media in cache_dir. Needs the same pixels in every epoch: clip and crop
    `centre`."""

    media_path: UserAddress | None = None
    """llava: the folder, of this machine or of s3://, that the media of the annotations are relative to. Unset: they
    have absolute paths or addresses."""
    system_prompt: str | None = None
    """llava: the system turn of conversations that have none. Unset: what the model's chat template does then."""
    max_tokens: Annotated[int, Field(ge=16)] = 4096
    """llava: tokens of a row, and of the longest conversation."""
    too_long: Literal["skip", "truncate_answer"] = "skip"
    """llava: conversations of more than max_tokens: left out and counted, or cut at their end, where the last answer
    is. Images and videos are never cut."""
    pack: bool = True
    """llava: fill rows with several conversations, which do not see each other."""
    pixels: PixelsRecipe = PixelsRecipe()
    """llava: sizes of images."""
    video: VideoRecipe = VideoRecipe()
    """llava: frames of videos."""

    @property
    def folder(self) -> Path:
        """The path of the kinds that read one folder."""
        assert isinstance(self.path, str)
        return Path(self.path)

    @property
    def shards(self) -> list[str]:
        """The patterns of webdataset."""
        return [self.path] if isinstance(self.path, str) else list(self.path)

    def parts(self) -> dict[str, tuple[DataRecipe, float]]:
        """Return the data sets of kind sets by name, each as a recipe of its own, with its weight. Raises ValueError
        for two of one name, and for keys that do not fit a set's kind."""
        found: dict[str, tuple[DataRecipe, float]] = {}
        for one in self.sets or ():
            name = one.name or one.path.rstrip("/").rpartition("/")[2]
            if name in found:
                raise ValueError(f"two sets are called {name}: give one of them another name")
            path = one.path if "://" in one.path or one.kind == "hf" else str(self.folder / one.path)
            keys = one.model_dump(include={"kind", "prompt", "caption_column", "image_column", "split"})
            shared = self.model_dump(include={"max_bad_fraction", "cache_dir"})
            found[name] = (DataRecipe(path=path, **keys, **shared), one.weight)
        return found

    @property
    def is_own_kind(self) -> bool:
        """The kind is a class of the user's."""
        return is_user_class(self.kind)

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> DataRecipe:
        if self.options and not self.is_own_kind and self.kind != "hf":
            raise ValueError(f"options are for a kind of your own, package.module:Class, not {self.kind}: remove them")
        if "streaming" in self.options and self.kind == "hf":
            raise ValueError("options.streaming is the key data.streaming: move it there")
        self._can_be_streamed()
        if (self.kind == "sets") != (self.sets is not None):
            raise ValueError("kind sets and the key sets belong together: name both, or neither")
        self.parts()
        if self.kind != "folder":
            self.require_default("prompt", unless="kind: folder")
        if self.kind not in ("folder", "hf"):
            self.require_default("caption_column", "image_column", unless="kind: folder or hf")
        many = self.kind in ("webdataset", "pairs", "llava") or self.is_own_kind
        if not many and (not isinstance(self.path, str) or "://" in self.path):
            raise ValueError(
                f"kind {self.kind} reads one folder of this machine: lists and URLs are for webdataset and pairs"
            )
        addresses = (*self.shards, self.media_path or "")
        if self.kind == "llava" and any("://" in a and not a.startswith("s3://") for a in addresses):
            raise ValueError("kind llava reads annotations and media of this machine or of s3://: name such places")
        if self.kind == "pairs" and (len(self.shards) > 1 or "://" in self.shards[0]):
            tables = [path for path in self.shards if path.lower().endswith(".jsonl")]
            if tables:
                raise ValueError(f"kind pairs reads one .jsonl file of this machine, or tar shards: {tables[0]}")
        if self.allow_pickle and self.kind not in ("cosmos", "folder"):
            raise ValueError(f"allow_pickle is about the embeddings of kind cosmos, not {self.kind}: remove it")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("prompt is blank: write the caption of all media, or remove it")
        if self.inputs and not (self.kind in ("paired", "folder", "webdataset", "sets") or self.is_own_kind):
            raise ValueError(f"inputs are of kind paired, folder, webdataset or sets, not {self.kind}: remove them")
        if len(set(self.inputs)) < len(self.inputs):
            raise ValueError(f"inputs names one twice: {self.inputs}")
        if "actions" not in self.inputs:
            self.require_default("actions", unless="inputs: [actions]")
        if isinstance(self.buckets, list) and len(set(self.buckets)) < len(self.buckets):
            raise ValueError(f"buckets names a size twice: {[list(size) for size in self.buckets]}")
        if self.choose == "even":
            self.require_default("choose_floor", "choose_memory", unless="choose: spread")
        else:
            self.require_default("shuffle", unless="choose: even, as spread draws at random")
        if self.cache_latents and (self.cache_dir is None or "random" in (self.clip, self.crop)):
            raise ValueError("cache_latents needs a cache_dir, and clip: centre and crop: centre")
        return self

    def _can_be_streamed(self) -> None:
        """Refuse what needs all samples to be known, or a second look at one."""
        if not self.streaming:
            return
        if self.kind != "hf":
            raise ValueError(f"streaming is for kind hf, not {self.kind}: remove it")
        if self.shuffle:
            raise ValueError("streaming reads rows in their stored order: set shuffle: false, or remove streaming")
        if self.buckets is not None:
            raise ValueError(
                "buckets needs the sizes of all media, which a stream does not know: remove one of the two"
            )
        if self.cache_latents:
            raise ValueError("cache_latents needs media that can be read again, not a stream: remove one of the two")
