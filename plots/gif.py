"""Animate one game of an Atari policy: plots/gif.py RUN_DIR OUT.gif"""

import argparse
import sys
from pathlib import Path
from unittest import mock

from gymnasium.wrappers import RenderCollection
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts

import ppo_atari


class RecordGif(RenderCollection):
    """In the place of RecordVideo: at the end write the game to `out`, in 32 colours."""

    def __init__(self, env, *_, **__):
        super().__init__(env)

    def close(self):
        super().close()
        first, *rest = map(Image.fromarray, self.frame_list[:: self.every])
        first = first.quantize(32, dither=Image.Dither.NONE)
        rest = [x.quantize(palette=first, dither=Image.Dither.NONE) for x in rest]
        first.save(self.out, save_all=True, append_images=rest, duration=self.duration, loop=0)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy", metavar="RUN_DIR", help="a run's folder, or its best.pt")
    parser.add_argument("out", metavar="OUT.gif", type=Path)
    parser.add_argument("--seed", default="1", help="of the game and the actions")
    parser.add_argument("--fps", type=int, default=30, help="pictures a second (15: as played)")
    parser.add_argument("--every", type=int, default=1, help="steps from one picture to the next")
    args = parser.parse_args(argv)
    RecordGif.out, RecordGif.duration, RecordGif.every = args.out, 1000 // args.fps, args.every
    flags = ["--evaluate", args.policy, "--video", "--episodes", "1", "--seed", args.seed]
    with mock.patch.object(ppo_atari.wrappers, "RecordVideo", RecordGif):
        ppo_atari.main(flags)


if __name__ == "__main__":
    main()
