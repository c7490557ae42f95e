"""Reference for vision-language SFT: transformers' forward of each conversation alone, in float64."""

import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from reference.draws import derive_seed, shuffled
from reference.networks import TrainedWeights
from reference.optimization import Optimization

IMAGE = "<|image_pad|>"


class Reasoner(TrainedWeights):
    """A float64 model, trained on LLaVA rows that are packed into sequences of at most `data.max_tokens`."""

    def __init__(self, folder, rows, media, options):
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).double()
        self.names, self.trained = zip(*self.model.named_parameters(), strict=True)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.image_id = self.tokenizer.convert_tokens_to_ids(IMAGE)
        self.o, self.samples = options, [self.tokenize(row, media) for row in rows]
        self.optimization = Optimization(self, options, options["run.steps"])
        per_step = options["engine.micro_batch_size"] * options["engine.gradient_accumulation"]
        sequences = self.sequences(options["run.steps"] * per_step)
        self.batches = [sequences[i : i + per_step] for i in range(0, len(sequences), per_step)]

    def named_weights(self, weights):
        return dict(zip(self.names, weights, strict=True))

    def tokenize(self, row, media):
        """Return (ids [L], labels [L] with -100 outside of answers, image inputs) of a conversation."""
        pictures = [Image.open(media / name) for name in row.get("image", [])]
        inputs = dict(self.processor(pictures, return_tensors="pt")) if pictures else {}
        counts = [int(grid.prod()) // self.processor.merge_size**2 for grid in inputs.get("image_grid_thw", [])]
        messages, ids, labels = [], [], []
        for question, answer in zip(row["conversations"][::2], row["conversations"][1::2], strict=True):
            parts = [{"type": "text", "text": text} for text in question["value"].split("<image>")]
            content = [part for text in parts for part in ({"type": "image"}, text)][1:]
            messages.append({"role": "user", "content": [part for part in content if part.get("text") != ""]})
            prompt = self.encode(messages, counts, add_generation_prompt=True)
            messages.append({"role": "assistant", "content": answer["value"]})
            whole = self.encode(messages, counts)
            end = max(i for i, token in enumerate(whole) if token == self.tokenizer.eos_token_id) + 1
            labels += [-100] * (len(prompt) - len(labels)) + whole[len(prompt) : end] + [-100] * (len(whole) - end)
            ids = whole
        return torch.tensor(ids), torch.tensor(labels), inputs

    def encode(self, messages, counts, **options):
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        first, *rest = text.split(IMAGE)
        text = first + "".join(IMAGE * n + piece for n, piece in zip(counts, rest, strict=False))
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def sequences(self, count):
        """Return the samples of the first `count` packed sequences: best-fit decreasing, in a new order each epoch."""
        sequences, epoch, seed = [], 0, self.o["run.seed"]
        while len(sequences) < count:
            size = len(self.samples)
            order = shuffled(size, derive_seed(seed, "data_order", epoch))
            lengths = [len(self.samples[index][0]) for index in order]
            bins = []
            for place in sorted(range(size), key=lambda i: (-lengths[i], i)):
                free = [self.o["data.max_tokens"] - sum(lengths[i] for i in one) - lengths[place] for one in bins]
                fitting = [(left, number) for number, left in enumerate(free) if left >= 0]
                if not fitting:
                    bins.append([])
                bins[min(fitting)[1] if fitting else -1].append(place)
            bin_order = shuffled(len(bins), derive_seed(seed, "row_order", epoch, 0))
            sequences += [[self.samples[order[i]] for i in sorted(bins[number])] for number in bin_order]
            epoch += 1
        return sequences[:count]

    def losses(self, samples):
        """Return (cross-entropy, 1.0 if the most likely token is correct) of all labelled tokens."""
        found = []
        for ids, labels, media in samples:
            inputs = {name: t.double() if t.is_floating_point() else t for name, t in media.items()}
            types = (ids == self.image_id).long()[None]
            logits = self.model(input_ids=ids[None], mm_token_type_ids=types, **inputs).logits[0, :-1]
            counts = labels[1:] != -100
            logits, targets = logits[counts], labels[1:][counts]
            found.append((cross_entropy(logits, targets, reduction="none"), (logits.argmax(1) == targets).double()))
        return (torch.cat(part) for part in zip(*found, strict=True))

    def train(self):
        """Return the metrics of each step."""
        metrics = []
        for sequences in self.batches:
            losses, hits = self.losses([sample for sequence in sequences for sample in sequence])
            step = {"vlm/loss": float(losses.detach().mean()), "vlm/token_accuracy": float(hits.mean())}
            metrics.append(step | self.optimization.update(losses.mean()))
        return metrics

    def validate(self, rows, media):
        with self.use(self.optimization.weights("ema")):
            losses, hits = self.losses([self.tokenize(row, media) for row in rows])
        return {"val/loss": float(losses.mean()), "val/token_accuracy": float(hits.mean())}
