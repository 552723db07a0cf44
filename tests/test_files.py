"""A directory appears with all its files or not at all."""

import pytest

from cumulant.files import new_directory


def fill(path, text, **options):
    with new_directory(path, **options) as draft:
        assert draft.parent == path.parent
        (draft / "a.txt").write_text(text)


@pytest.mark.parametrize("durable", [False, True])
def test_a_directory_gets_its_name_at_the_end(tmp_path, durable):
    with new_directory(tmp_path / "deep" / "new", durable=durable) as draft:
        (draft / "a.txt").write_text("a")
        assert not (tmp_path / "deep" / "new").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["new"]
    assert (tmp_path / "deep" / "new").stat().st_mode & 0o777 == 0o755


def test_a_failure_leaves_no_directory(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "new", prefix=".draft-"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_there_is_replaced_only_if_asked(tmp_path):
    fill(tmp_path / "new", "old")
    with pytest.raises(OSError, match="not empty"):
        fill(tmp_path / "new", "other")
    assert (tmp_path / "new" / "a.txt").read_text() == "old"
    fill(tmp_path / "new", "other", overwrite=True)
    assert (tmp_path / "new" / "a.txt").read_text() == "other"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
