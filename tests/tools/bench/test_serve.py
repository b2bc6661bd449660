import json

from tests.tools.text_model import save_text_model
from tools.bench.serve import main


def test_a_server_is_measured_against_its_engine(tmp_path, capsys):
    model = save_text_model(tmp_path / "model")
    output = tmp_path / "out.json"
    assert main([str(model), "--clients", "2", "--tokens", "6", "--rounds", "1", "--json", str(output)]) == 0
    (figures,) = json.loads(output.read_text())
    assert figures.pop("clients") == 2
    assert set(figures) == {"engine", "server, whole", "server, streamed"} and all(speed > 0 for speed in figures.values())
    assert "2 clients, 6 tokens each, tokens/s (of the engine's): engine" in capsys.readouterr().out
