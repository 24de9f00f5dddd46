"""Channels of a host: what is said where one is missing, and which splits are this host's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.channels import Channels, Place
from hetero.errors import InputError
from hetero.job import InputContext, Job

PLACE = Place("algo-2", "data_group", ("data_group", "dnn_group"))
GROUPS = "TrainingInput(..., instance_groups=['data_group', 'dnn_group'])"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder that SageMaker made for the channel `training`."""
    made = tmp_path / "input" / "data" / "training"
    made.mkdir(parents=True)
    return made


def here(folder: Path, **options: Any) -> Channels:
    return Channels({"training": str(folder)}, place=PLACE, **options)


def refused(channels: Channels, name: str = "training") -> str:
    with pytest.raises(InputError) as caught:
        InputContext(channels=channels).channel_files(name)
    return str(caught.value)


def test_a_channel_that_the_host_does_not_have_is_named_with_host_group_and_what_to_write(folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        InputContext(channels=here(folder)).channel("test")
    expected = "There is no channel 'test' on host algo-2 of group 'data_group' (channels: training). "
    assert str(caught.value) == f"{expected}Give it to that group too: {GROUPS}."


def test_a_job_of_one_group_is_not_told_of_groups(folder: Path) -> None:
    channels = Channels({"training": str(folder)}, place=Place("algo-1", "homogeneousCluster", ("homogeneousCluster",)))
    text = refused(channels, "test")
    assert "on host algo-1 (channels: training). Add it to the job: fit({'test': TrainingInput(...)})." in text
    assert refused(channels).endswith("has no files on host algo-1. Is its S3 prefix empty?")


def test_a_listed_channel_without_a_folder_or_without_files_is_one_that_the_host_does_not_have(folder: Path) -> None:
    text = refused(here(folder))
    assert "has no files on host algo-2 of group 'data_group'. Is its S3 prefix empty, or does it not go to" in text
    assert text.endswith(f"to that group ({GROUPS})?")
    folder.rmdir()
    text = refused(here(folder))
    assert f"has no folder on host algo-2 of group 'data_group': '{folder}' does not exist. Give it" in text


def test_an_empty_share_of_a_sharded_channel_is_said_to_be_one(folder: Path) -> None:
    text = refused(here(folder, sharded=["training"]))
    assert "It is ShardedByS3Key: is its S3 prefix empty, or has it fewer files than there are hosts?" in text


def test_a_channel_in_pipe_mode_has_no_files(folder: Path) -> None:
    text = refused(here(folder, piped=["training"]))
    assert "Channel 'training' comes in Pipe mode" in text
    assert "input_mode='FastFile'" in text
    assert InputContext(channels=here(folder, piped=["training"])).channel("training") == str(folder)


def test_a_folder_given_by_flag_is_corrected_by_flag(tmp_path: Path) -> None:
    text = refused(here(tmp_path / "none"))
    assert text == f"Channel 'training' is '{tmp_path}/none', which does not exist. Correct --channel training=FOLDER."
    assert "Put the data there or name another folder." in refused(here(tmp_path))


def test_elsewhere_than_on_sagemaker_there_are_no_groups(tmp_path: Path) -> None:
    plain = Channels({"training": str(tmp_path)})
    assert refused(plain, "test") == "There is no channel 'test' (channels: training). Give --channel test=FOLDER."
    assert refused(plain) == f"Channel 'training' ({tmp_path}) has no files. Put the data there or name another folder."


def test_a_splits_function_that_finds_nothing_is_told_about_the_channels_it_looked_into(folder: Path) -> None:
    job = Job("digits")
    job.splits(lambda ctx: list(Path(ctx.channel("training")).glob("*.tfrecord")))
    with pytest.raises(InputError, match=r"returned an empty list\. Channel 'training' .* has no files on host algo-2"):
        job.list_splits(InputContext(channels=here(folder)))
    job.splits(lambda _ctx: [])
    with pytest.raises(InputError, match=r"returned an empty list\.$"):
        job.list_splits(InputContext(channels=here(folder)))


def test_channels_that_were_asked_for_and_have_no_files_are_lacking(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    (folder / ".hidden").touch()
    folders = {"training": str(folder), "full": str(tmp_path / "full"), "unasked": "/none", "far": "s3://bucket/prefix"}
    channels = Channels(folders)
    assert [channels["training"], channels["full"], channels["far"]] == [str(folder), *list(folders.values())[1::2]]
    assert channels.get("missing") is None
    assert channels.lacking() == ["training", "missing"]


@pytest.mark.parametrize(
    ("split", "channel"),
    [
        ("{root}/part-1", "training"),
        ("{root}/deep/part-1", "training"),
        ("{root}/./deep/../part-1", "training"),
        ("{root}", "training"),
        (["x", {"file": "{root}/part-1", "rows": [0, 9]}], "training"),
        ({"{root}/part-1": 3}, "training"),
        ("{root}-2/part-1", None),
        ("{root}/../other", None),
        ("part-1", None),
        ("s3://bucket{root}/part-1", None),
        (7, None),
        (None, None),
        ([], None),
    ],
)
def test_a_split_is_local_if_a_path_in_it_lies_in_a_sharded_channel(folder: Path, split: Any, channel: Any) -> None:
    def at_root(value: Any) -> Any:
        if isinstance(value, str):
            return value.format(root=folder) if "{" in value else value
        if isinstance(value, list):
            return [at_root(part) for part in value]
        return {at_root(k): at_root(v) for k, v in value.items()} if isinstance(value, dict) else value

    assert here(folder, sharded=["training"]).sharded_channel(at_root(split)) == channel
    assert here(folder).sharded_channel(at_root(split)) is None


def test_a_split_is_local_too_where_the_base_folder_is_a_link(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "ml"
    link.symlink_to(folder)
    channels = here(link, sharded=["training"])
    assert channels.sharded_channel(f"{link}/a") == channels.sharded_channel(f"{folder}/a") == "training"


def test_a_file_that_data_hosts_did_not_find_leads_to_its_channel(folder: Path) -> None:
    hint = here(folder).hint(f"NotFoundError: {folder}/part-1; No such file or directory")
    assert "It was listed on host algo-2 of group 'data_group', but the data hosts read it" in hint
    assert "let channel 'training' go to them too" in hint
    assert here(folder).hint(f"NotFoundError: {folder}-2/part-1") == ""
    assert Channels({"training": str(folder)}).hint(f"{folder}/part-1") == ""
