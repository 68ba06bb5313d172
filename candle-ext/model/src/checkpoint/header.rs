//! The header of a safetensors file: writing, and reading with validation.

use std::{io::Read, ops::Range, path::Path};

use safetensors::{Dtype, SafeTensorError, SafeTensors, tensor::Metadata};
use serde_json::{Map, Value, json};

use crate::ModelError;

/// A tensor in the header of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderEntry {
    /// Name of the tensor.
    pub name: String,
    /// Dtype of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// Metadata of a tensor in a file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StoredTensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Byte range in the file.
    pub(super) bytes: Range<usize>,
}

/// Bytes of the header's length field.
const PRELUDE: usize = 8;
const LONGEST_HEADER: usize = 100_000_000;

/// Returns the bytes before the data of a safetensors file: the length of the header, and the header, padded with spaces to
/// align the data. The data of `tensors` follow in this order, without gaps. Empty `metadata` are left out.
pub fn encode_header(metadata: &[(&str, String)], tensors: impl IntoIterator<Item = HeaderEntry>) -> Vec<u8> {
    let mut header = Map::new();
    if !metadata.is_empty() {
        let metadata = metadata.iter().map(|(key, value)| ((*key).to_owned(), json!(value)));
        header.insert("__metadata__".to_owned(), Value::Object(metadata.collect()));
    }
    let mut begin = 0;
    for HeaderEntry { name, dtype, shape } in tensors {
        let end = begin + shape.iter().product::<usize>() * dtype.bitsize() / 8;
        header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}));
        begin = end;
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(PRELUDE), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

/// Reads the header of a safetensors file. Returns the offset of the data, and the header. The error describes the damage.
pub fn read_header(file: &mut impl Read) -> Result<(u64, Metadata), String> {
    let mut length = [0u8; PRELUDE];
    file.read_exact(&mut length).map_err(|error| format!("the header is missing: {error}"))?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER as u64 {
        return Err(format!("the header has {length} bytes"));
    }
    let mut json = vec![0u8; length as usize];
    file.read_exact(&mut json).map_err(|error| format!("the header is truncated: {error}"))?;
    let metadata = serde_json::from_slice(&json).map_err(|error| format!("the header is malformed: {error}"))?;
    Ok((PRELUDE as u64 + length, metadata))
}

/// Parses the tensors of a safetensors file. Offsets must be inside the file, match shape and dtype, and not overlap.
pub(super) fn parse(path: &Path, file: &[u8]) -> Result<Vec<StoredTensor>, ModelError> {
    let bad = |problem: String| ModelError::malformed(path, problem);
    let header = header_bytes(file).map_err(bad)?;
    let (header_len, metadata) = SafeTensors::read_metadata(file).map_err(|e| bad(explain(e, header, file.len())))?;
    let start = PRELUDE + header_len;
    let mut entries: Vec<StoredTensor> = metadata
        .tensors()
        .into_iter()
        .map(|(name, info)| StoredTensor {
            name,
            dtype: info.dtype,
            shape: info.shape.clone(),
            bytes: start + info.data_offsets.0..start + info.data_offsets.1,
        })
        .collect();
    entries.sort_by(|a, b| a.bytes.start.cmp(&b.bytes.start).then_with(|| a.name.cmp(&b.name)));
    Ok(entries)
}

fn header_bytes(file: &[u8]) -> Result<&[u8], String> {
    let Some((prelude, rest)) = file.split_first_chunk::<PRELUDE>() else {
        return Err(format!(
            "{} bytes are too few for a safetensors file; it was cut short, download it again",
            file.len()
        ));
    };
    let length = u64::from_le_bytes(*prelude);
    if rest.first().is_some_and(|&first| first != b'{') {
        return Err("not a safetensors file: the header does not begin with `{`".to_string());
    }
    match usize::try_from(length) {
        Ok(n) if n > LONGEST_HEADER => {
            Err(format!("the header claims {length} bytes, at most {LONGEST_HEADER} are allowed"))
        }
        Ok(n) => rest.get(..n).ok_or_else(|| {
            format!(
                "the header claims {length} bytes, but the file has {} in all; it was cut short, download it again",
                file.len()
            )
        }),
        Err(_) => Err(format!("the header claims {length} bytes")),
    }
}

fn explain(error: SafeTensorError, header: &[u8], file_len: usize) -> String {
    match error {
        SafeTensorError::MetadataIncompleteBuffer => {
            let data_len = serde_json::from_slice::<Metadata>(header).map(|m| m.data_len()).unwrap_or_default();
            let want = data_len.saturating_add(PRELUDE + header.len());
            let fix = if file_len < want { "it was cut short, download it again" } else { "it was not written whole" };
            format!("the header describes a file of {want} bytes, it has {file_len}; {fix}")
        }
        SafeTensorError::InvalidOffset(name) => {
            format!("tensor `{name}`: its offsets overlap another tensor's, leave a gap or run backwards")
        }
        SafeTensorError::TensorInvalidInfo => {
            "a tensor's shape and dtype do not make the number of bytes between its offsets".to_string()
        }
        SafeTensorError::ValidationOverflow => "a tensor's shape is absurd: its size overflows".to_string(),
        other => other.to_string(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
    }

    const TWO: &str = r#"{"__metadata__":{"format":"pt"},
        "a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},
        "b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]}}"#;

    fn good() -> Vec<u8> {
        file(TWO, &[7; 14])
    }

    #[track_caller]
    fn refused(bytes: &[u8], part: &str) {
        let message = parse(Path::new("x.safetensors"), bytes).unwrap_err().to_string();
        assert!(message.contains("x.safetensors") && message.contains(part), "`{message}` lacks `{part}`");
    }

    #[test]
    fn entries_come_in_the_files_order() {
        let entries = parse(Path::new("x"), &good()).unwrap();
        let names: Vec<_> = entries.iter().map(|e| e.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(entries[1].bytes, good().len() - 6..good().len());
        assert_eq!((entries[0].dtype, entries[0].shape.as_slice()), (Dtype::F32, &[2, 1][..]));
    }

    #[test]
    fn a_truncated_file_is_an_error_that_names_its_size() {
        refused(&[], "too few");
        refused(&good()[..5], "too few");
        refused(&good()[..40], "cut short");
        refused(&good()[..good().len() - 1], "cut short");
        refused(&[good(), vec![0]].concat(), "not written whole");
    }

    #[test]
    fn absurd_headers_are_refused() {
        refused(&[&u64::MAX.to_le_bytes()[..], b"{}"].concat(), "claims 18446744073709551615");
        refused(&[&200_000_000_u64.to_le_bytes()[..], b"{}"].concat(), "at most 100000000");
        refused(b"PK\x03\x04 a zip of pickles", "does not begin with");
        refused(&file("{\"a\": oops}", &[]), "JSON");
        refused(&file("{\"a\u{0}\": 1}", &[]), "JSON");
        let tensor = |shape: &str, offsets: &str| {
            file(&format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#), &[0; 8])
        };
        refused(&tensor("[2]", "[8,0]"), "`a`");
        refused(&tensor("[2]", "[4,12]"), "`a`");
        refused(&tensor("[3]", "[0,8]"), "number of bytes");
        refused(&tensor("[4294967296,4294967296,4294967296]", "[0,8]"), "overflows");
        let unknown_dtype = String::from_utf8(tensor("[2]", "[0,8]")).unwrap().replace("F32", "Z99");
        refused(unknown_dtype.as_bytes(), "JSON");
        let overlap = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
            "b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
        refused(&file(overlap, &[0; 8]), "overlap");
    }

    #[test]
    fn a_written_header_is_read_back() {
        let entry =
            |name: &str, dtype, shape: &[usize]| HeaderEntry { name: name.to_owned(), dtype, shape: shape.to_vec() };
        let entries = [entry("b", Dtype::U32, &[2, 1]), entry("a", Dtype::BF16, &[3])];
        let header = encode_header(&[("format", "pt".to_owned())], entries.clone());
        assert_eq!(header.len() % 8, 0);
        let (start, metadata) = read_header(&mut &header[..]).unwrap();
        assert_eq!(start, header.len() as u64);
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        let read = parse(Path::new("x"), &[&header[..], &[7; 14]].concat()).unwrap();
        let found: Vec<_> =
            read.into_iter().map(|StoredTensor { name, dtype, shape, .. }| entry(&name, dtype, &shape)).collect();
        assert_eq!(found, entries);
        assert!(read_header(&mut &encode_header(&[], entries)[..]).unwrap().1.metadata().is_none());
        for length in 0..header.len() {
            assert!(read_header(&mut &header[..length]).unwrap_err().contains("the header is"));
        }
    }

    proptest! {
        #[test]
        fn mutated_files_never_panic(
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = good();
            for (at, byte) in edits {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.truncate(cut.index(good().len() * 2));
            if let Ok(entries) = parse(Path::new("x"), &bytes) {
                for entry in entries {
                    prop_assert!(bytes.get(entry.bytes).is_some());
                }
            }
        }

        #[test]
        fn any_header_text_never_panics(text in "\\PC{0,80}") {
            let _ = parse(Path::new("x"), &file(&text, &[0; 8]));
        }

        #[test]
        fn any_shape_and_offsets_never_panic(
            shape in prop::collection::vec(any::<u64>(), 0..4),
            from in any::<u64>(),
            to in any::<u64>(),
        ) {
            let header = format!(r#"{{"a":{{"dtype":"F16","shape":{shape:?},"data_offsets":[{from},{to}]}}}}"#);
            let bytes = file(&header, &[0; 8]);
            if let Ok(entries) = parse(Path::new("x"), &bytes) {
                prop_assert!(bytes.get(entries[0].bytes.clone()).is_some());
            }
        }
    }
}
