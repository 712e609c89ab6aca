import time
from pathlib import Path

from draftworks.progress import Progress
from draftworks.stages import STAGES
from draftworks.stages.generate import Generate
from draftworks.workspace import Workspace


def test_it(tiny_config, tiny_target):
    print(tiny_target.stop_ids, tiny_target.tokenizer.get_vocab().__len__())
    print(tiny_target.text(tiny_target.render([{"role": "user", "content": "Hi"}]), special=True))
    ws = Workspace(Path(tiny_config.workspace))
    for cls in STAGES.values():
        t = time.time()
        st = cls(tiny_config, ws)
        st.run(Progress())
        print(st.verify().sentence, time.time() - t)
    g = Generate(tiny_config, ws)
    print(g.store.rejected())
    for s in list(g.store.samples())[:6]:
        print(len(s.token_ids), s.loss_tokens, s.finish_reason, repr(s.text))
    print((ws.root / "artifacts").rglob("evaluation.json").__next__().read_text())
