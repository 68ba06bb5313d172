//! Checkpoints that were changed after they were written, and invalid manifests.

use std::path::PathBuf;

use proptest::prelude::*;
use sha2::{Digest, Sha256};

use super::*;

/// Saves steps 1 and 2, applies `harm` to the folder of step 2, and expects to resume step 1 with this reason.
#[track_caller]
fn check_fall_back(harm: impl Fn(&Path), reason: &str) {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, None);
    save_step(&LocalDisk, &plan, 1).unwrap();
    harm(&save_step(&LocalDisk, &plan, 2).unwrap().dir);
    let mut toy = Toy::at(0);
    let resumed = resume(&plan, &fingerprint(), &mut toy, &ProcessGroup::solo()).unwrap().unwrap();
    assert_eq!((resumed.run.step, &toy), (1, &Toy::at(1)));
    assert!(resumed.skipped[0].reason.contains(reason), "{}", resumed.skipped[0].reason);

    fs::remove_dir_all(plan.dir(Tag { step: 1, epoch: 0 })).unwrap();
    let error = resume(&plan, &fingerprint(), &mut toy, &ProcessGroup::solo()).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(CheckpointError::NoneComplete { .. })), "{error}");
    assert!(error.to_string().contains(reason), "{error}");
}

fn edit(path: PathBuf, change: impl Fn(&mut Vec<u8>)) {
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_flipped_bit_changes_the_hash() {
    for name in ["shard_00000_00001.safetensors", "shard_00000_00002.safetensors", "state.json"] {
        check_fall_back(|dir| edit(dir.join(name), |bytes| bytes[20] ^= 1), "its hash differs");
    }
}

#[test]
fn truncated_missing_and_swapped_files_are_detected() {
    check_fall_back(|dir| edit(dir.join("state.json"), |bytes| _ = bytes.pop()), "bytes, not");
    check_fall_back(|dir| fs::remove_file(dir.join("shard_00000_00002.safetensors")).unwrap(), "shard_00000_00002");
    check_fall_back(|dir| fs::remove_file(dir.join("manifest.json")).unwrap(), "no manifest.json");
    check_fall_back(|dir| edit(dir.join("manifest.json"), |bytes| bytes.truncate(99)), "not readable");
    let older = |dir: &Path| dir.with_file_name("epoch_0_global_step_1").join("manifest.json");
    check_fall_back(|dir| _ = fs::copy(older(dir), dir.join("manifest.json")).unwrap(), "says step 1");
}

/// Gives optimizer states their names of version 4, in the files and in the manifest.
fn name_as_before(dir: &Path) -> serde_json::Value {
    let rename = |name: &str| name.replace("optimizer.exp_avg/", "exp_avg/");
    let path = dir.join("manifest.json");
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for tensor in manifest["tensors"].as_array_mut().unwrap() {
        tensor["name"] = json!(rename(tensor["name"].as_str().unwrap()));
    }
    for file in manifest["files"].as_array_mut().unwrap() {
        let path = dir.join(file["name"].as_str().unwrap());
        // The header of a file keeps its length.
        edit(path.clone(), |bytes| {
            let name = b"optimizer.exp_avg/";
            while let Some(at) = bytes.windows(name.len()).position(|window| window == name) {
                let end = at + bytes[at..].iter().position(|byte| *byte == b'"').unwrap() + 1;
                let field = String::from_utf8(bytes[at..end].to_vec()).unwrap();
                bytes.splice(at..end, format!("{:<width$}", rename(&field), width = field.len()).into_bytes());
            }
        });
        file["blake3"] = json!(blake3::hash(&fs::read(path).unwrap()).to_hex().as_str());
    }
    manifest["version"] = json!(4);
    fs::write(path, manifest.to_string()).unwrap();
    manifest
}

#[test]
fn a_checkpoint_of_version_4_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, None);
    let saved = save_step(&LocalDisk, &plan, 2).unwrap().dir;
    let names = name_as_before(&saved)["tensors"].to_string();
    assert!(names.contains(r#""exp_avg/a""#) && !names.contains("optimizer."), "{names}");
    let mut toy = Toy::at(0);
    resume(&plan, &fingerprint(), &mut toy, &ProcessGroup::solo()).unwrap().unwrap();
    assert_eq!(toy, Toy::at(2));
}

/// Turns a manifest into one of version 1.
fn hash_as_before(dir: &Path) {
    let path = dir.join("manifest.json");
    let mut manifest = name_as_before(dir);
    manifest["version"] = json!(1);
    for file in manifest["files"].as_array_mut().unwrap() {
        let bytes = fs::read(dir.join(file["name"].as_str().unwrap())).unwrap();
        let hash: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        file.as_object_mut().unwrap().remove("blake3");
        file["sha256"] = json!(hash);
    }
    fs::write(path, manifest.to_string()).unwrap();
}

#[test]
fn a_checkpoint_of_version_1_resumes_and_is_verified() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, None);
    hash_as_before(&save_step(&LocalDisk, &plan, 2).unwrap().dir);
    assert_eq!(resumed_step(&plan), 2);
    let harm = |dir: &Path| {
        hash_as_before(dir);
        edit(dir.join("shard_00000_00001.safetensors"), |bytes| bytes[20] ^= 1);
    };
    check_fall_back(harm, "its hash differs");
}

fn a_manifest() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    fs::read(save_step(&LocalDisk, &plan(&dir, None), 1).unwrap().dir.join("manifest.json")).unwrap()
}

/// Changes, inserts or removes a few bytes.
fn mutate(bytes: &mut Vec<u8>, edits: &[(u8, usize, u8)]) {
    for &(format, at, byte) in edits {
        if bytes.is_empty() {
            return;
        }
        let at = at % bytes.len();
        match format % 4 {
            0 => bytes[at] = byte,
            1 => bytes.insert(at, byte),
            2 => _ = bytes.remove(at),
            _ => bytes.truncate(at),
        }
    }
}

proptest! {
    #[test]
    fn a_mutated_manifest_parses_or_fails(edits in prop::collection::vec(any::<(u8, usize, u8)>(), 1..6)) {
        thread_local!(static MANIFEST: Vec<u8> = a_manifest());
        let mut bytes = MANIFEST.with(Clone::clone);
        mutate(&mut bytes, &edits);
        let _ = Manifest::parse(&bytes);
    }

    #[test]
    fn arbitrary_bytes_do_not_parse_as_a_manifest(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Manifest::parse(&bytes).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_mutated_checkpoint_never_loads_wrong_values(
        file in 0..4usize,
        edits in prop::collection::vec(any::<(u8, usize, u8)>(), 1..3),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let plan = plan(&dir, None);
        let saved = save_step(&LocalDisk, &plan, 1).unwrap().dir;
        edit(saved.join(&names(&saved)[file]), |bytes| mutate(bytes, &edits));
        let mut toy = Toy::at(0);
        match resume(&plan, &fingerprint(), &mut toy, &ProcessGroup::solo()) {
            Ok(resumed) => prop_assert_eq!((resumed.unwrap().run, toy), (run(1), Toy::at(1))),
            Err(_) => prop_assert_eq!(toy, Toy::at(0)),
        }
    }
}

#[track_caller]
fn check_manifest(change: impl Fn(&mut serde_json::Value), want: &str) {
    let mut manifest = serde_json::from_slice(&a_manifest()).unwrap();
    change(&mut manifest);
    let error = Manifest::parse(manifest.to_string().as_bytes()).unwrap_err();
    assert!(error.contains(want), "{error}");
}

#[test]
fn an_invalid_manifest_error_names_the_field() {
    check_manifest(|m| m["version"] = json!(6), "this program reads candlewick-sharded up to version 5");
    check_manifest(|m| m["extra"] = json!(2), "unknown field `extra`");
    for name in ["../x", "a/b", "", ".", "/etc/passwd", "manifest.json"] {
        check_manifest(|m| m["files"][0]["name"] = json!(name), "is not a file name");
    }
    check_manifest(|m| m["files"][1]["name"] = m["files"][0]["name"].clone(), "is listed twice");
    check_manifest(|m| m["files"][0]["blake3"] = json!("abc"), "the hash of");
    check_manifest(|m| m["files"][0]["sha256"] = m["files"][0]["blake3"].clone(), "has two hashes or none");
    check_manifest(|m| _ = m["files"][0].as_object_mut().unwrap().remove("blake3"), "has two hashes or none");
    check_manifest(|m| _ = m["files"].as_array_mut().unwrap().pop(), "state.json is not listed");
    check_manifest(|m| m["tensors"][0]["file"] = json!("x"), "which is not listed");
    check_manifest(
        |m| m["tensors"][1]["name"] = m["tensors"][0]["name"].clone(),
        "is listed with the shapes [3, 5] and [7]",
    );
    check_manifest(|m| m["tensors"][0]["offset"] = json!([1, 0]), "has the offset [1, 0]");
    let range = |start: u64, end: u64| json!({"start": start, "end": end});
    check_manifest(|m| m["tensors"][0]["range"] = range(3, 3), "has no elements 3..3");
    check_manifest(|m| m["tensors"][0]["range"] = range(0, 1_000_000), "has no elements 0..1000000");
    let twice = |m: &mut serde_json::Value| {
        let mut chunk = m["tensors"][0].clone();
        chunk["range"] = range(1, 2);
        m["tensors"].as_array_mut().unwrap().push(chunk);
    };
    check_manifest(twice, "is listed twice");
    check_manifest(|m| m["tensors"][0]["shape"] = json!([u64::MAX, 3]), "has an impossible shape");
    check_manifest(|m| m["tensors"][0]["shape"] = json!([1000, 1000]), "larger than the file");
}
