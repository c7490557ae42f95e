"""Small LeRobot datasets of versions 2.1 and 3.0 with the same episodes, in the layout that lerobot writes.

Version 3.0 joins the videos of several episodes in a file without encoding them again, as lerobot's converter does.
The left half of frame i of an episode is grey, `clips.level(i)`. The right half shows the episode and the camera.
"""

import io
import json
from dataclasses import dataclass, field

import av
import numpy as np

from clips import index_of, level, write_clip

FPS = 16
STATE, ACTION = "observation.state", "action"
FRONT, WRIST = "observation.images.front", "observation.images.wrist"
INDICES = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@dataclass
class Recorded:
    """An episode: video files by camera, states [N,6], actions [N,2] and tasks."""

    videos: dict[str, bytes]
    state: np.ndarray
    action: np.ndarray
    tasks: list[str] = field(default_factory=lambda: ["push the block"])

    @property
    def length(self):
        return len(self.action)


def record(folder, lengths, *, cameras=(FRONT,), size=(32, 32), tasks=None, pictures=None, **options):
    """Return episodes of these lengths in frames. Their videos have a keyframe every two frames by default.

    pictures: frames that replace those of all episodes. options: of the encoder.
    """
    draws, episodes = np.random.default_rng(0), []
    folder.mkdir(parents=True, exist_ok=True)
    for e, length in enumerate(lengths):
        videos = {}
        for k, camera in enumerate(cameras):
            frames = np.full((length, *size, 3), 20 * e + 100 * k + 10, np.uint8)
            frames[:, :, : size[1] // 2] = np.array([level(i) for i in range(length)]).reshape(-1, 1, 1, 1)
            shown = frames if pictures is None else pictures
            file = write_clip(folder / "one.mp4", pictures=shown, fps=FPS, size=size, **{"g": "2", **options})
            videos[camera] = file.read_bytes()
        action = np.stack([np.arange(length), np.full(length, e)], axis=1).astype(np.float32)
        episode = Recorded(videos, draws.normal(size=(length, 6)).astype(np.float32), action)
        episode.tasks = episode.tasks if tasks is None else tasks[e]
        episodes.append(episode)
    return episodes


def frame_index(frame):
    """Return the index of a frame [H,W,3] in its episode."""
    return index_of(frame[:, : frame.shape[1] // 2])


def write_lerobot(root, version, episodes, *, per_file=2, row_groups=True):
    """Write a dataset. per_file: episodes in a file of version 3.0. row_groups: one row group per episode."""
    import pyarrow.parquet as pq

    write = {"v2.1": write_v2, "v3.0": write_v3}[version]
    starts = np.cumsum([0, *(one.length for one in episodes)]).tolist()
    tasks = list(dict.fromkeys(task for one in episodes for task in one.tasks))
    tables = [rows(e, one, starts[e], tasks) for e, one in enumerate(episodes)]
    info = {
        "codebase_version": version,
        "robot_type": "toy",
        "fps": FPS,
        "features": features(episodes[0]),
        "total_episodes": len(episodes),
        "total_frames": starts[-1],
        "total_tasks": len(tasks),
        "chunks_size": 1000,
        "splits": {"train": f"0:{len(episodes)}"},
    }
    (root / "meta").mkdir(parents=True)
    paths = write(root, episodes, tables, starts, tasks, pq, per_file, row_groups)
    (root / "meta/info.json").write_text(json.dumps(info | dict(zip(("data_path", "video_path"), paths, strict=True))))
    return root


def write_v2(root, episodes, tables, starts, tasks, pq, per_file, row_groups):
    data = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    lines = {"episodes": [], "tasks": [{"task_index": i, "task": task} for i, task in enumerate(tasks)]}
    for e, one in enumerate(episodes):
        place = {"episode_chunk": 0, "episode_index": e}
        pq.write_table(tables[e], new_file(root / data.format(**place)))
        for camera, content in one.videos.items():
            new_file(root / video.format(**place, video_key=camera)).write_bytes(content)
        lines["episodes"].append({"episode_index": e, "tasks": one.tasks, "length": one.length})
    for name, rows in lines.items():
        (root / f"meta/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data, video


def write_v3(root, episodes, tables, starts, tasks, pq, per_file, row_groups):
    import pyarrow as pa

    data = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    video = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    meta = []
    for first in range(0, len(episodes), per_file):
        place, group = (
            {"chunk_index": 0, "file_index": first // per_file},
            range(first, min(first + per_file, len(episodes))),
        )
        joined = pa.concat_tables([tables[e] for e in group])
        size = None if row_groups else len(joined)
        with pq.ParquetWriter(new_file(root / data.format(**place)), joined.schema) as writer:
            for table in [tables[e] for e in group] if row_groups else [joined]:
                writer.write_table(table, row_group_size=size)
        for camera in episodes[first].videos:
            join_videos(
                new_file(root / video.format(**place, video_key=camera)), [episodes[e].videos[camera] for e in group]
            )
        for e in group:
            row = {"episode_index": e, "tasks": episodes[e].tasks, "length": episodes[e].length}
            row |= {f"data/{name}": value for name, value in place.items()}
            row |= {"dataset_from_index": starts[e], "dataset_to_index": starts[e + 1], "stats/action/mean": [0.0, 0.0]}
            for camera in episodes[e].videos:
                row |= {f"videos/{camera}/{name}": value for name, value in place.items()}
                for name, edge in (("from", e), ("to", e + 1)):
                    row[f"videos/{camera}/{name}_timestamp"] = (starts[edge] - starts[first]) / FPS
            meta.append(row)
    pq.write_table(pa.Table.from_pylist(meta), new_file(root / "meta/episodes/chunk-000/file-000.parquet"))
    names = pa.table({"task_index": list(range(len(tasks))), "__index_level_0__": tasks})
    pq.write_table(names, root / "meta/tasks.parquet")
    return data, video


def new_file(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def rows(index, episode, start, tasks):
    """Return the table of an episode."""
    import pyarrow as pa

    n = episode.length
    columns = {
        name: pa.array(list(values), pa.list_(pa.float32(), values.shape[1]))
        for name, values in ((STATE, episode.state), (ACTION, episode.action))
    }
    numbers = ((np.arange(n) / FPS).astype(np.float32), np.arange(n), np.full(n, index), start + np.arange(n))
    columns |= dict(
        zip(INDICES, (*numbers, np.full(n, tasks.index(episode.tasks[0]) if episode.tasks else 0)), strict=True)
    )
    return pa.table(columns)


def features(episode):
    def sized(content):
        with av.open(io.BytesIO(content)) as container:
            stream = container.streams.video[0]
            return [stream.height, stream.width, 3]

    found = {
        camera: {"dtype": "video", "shape": sized(content), "names": ["height", "width", "channels"], "info": {}}
        for camera, content in episode.videos.items()
    }
    found |= {
        name: {"dtype": "float32", "shape": [values.shape[1]], "names": None}
        for name, values in ((STATE, episode.state), (ACTION, episode.action))
    }
    types = dict.fromkeys(INDICES, "int64") | {"timestamp": "float32"}
    return found | {name: {"dtype": kind, "shape": [1], "names": None} for name, kind in types.items()}


def join_videos(path, contents):
    """Join video files without encoding them again."""
    with av.open(str(path), "w") as output:
        stream, offset = None, 0
        for content in contents:
            with av.open(io.BytesIO(content)) as container:
                source = container.streams.video[0]
                stream = stream or output.add_stream_from_template(source)
                for packet in container.demux(source):
                    if packet.dts is not None:
                        packet.pts, packet.dts, packet.stream = packet.pts + offset, packet.dts + offset, stream
                        output.mux(packet)
                offset += source.duration


def change_info(root, **values):
    file = root / "meta/info.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_episodes(root, change):
    """Apply `change` to the list of rows in meta/episodes of version 3.0."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = root / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(file).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows), file)


def delay(episode, num_frames, *edges):
    """Return a change that makes an episode of the front camera start or end later."""

    def change(rows):
        for edge in edges:
            rows[episode][f"videos/{FRONT}/{edge}_timestamp"] += num_frames / FPS

    return change
