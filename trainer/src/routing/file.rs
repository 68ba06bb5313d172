//! A file of a record: safetensors with the experts of a rank's tokens of a micro-batch.
//!
//! Tensors are `rows`, `input_ids` and `layer-I` for each layer with experts. The metadata have the numbers of the model.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, BufReader};
use std::path::Path;

use candlewick_model::checkpoint::{HeaderEntry, encode_header, little_endian, read_header};
use candlewick_parallel::RoutedMicro;
use candlewick_text::files::open_regular_file;
use safetensors::{Dtype, SafeTensors};

use super::routed_model::RoutedModel;

/// The version of the format, in the metadata of each file.
const FORMAT_VERSION: usize = 1;
const ROWS: &str = "rows";
const INPUT_IDS: &str = "input_ids";
const LAYER: &str = "layer-";
const RUN: &str = "run";

/// The contents of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RoutingFile {
    pub(super) top_k: usize,
    pub(super) n_experts: usize,
    /// Layers with experts of the whole model.
    pub(super) n_layers: usize,
    /// Tokens of the whole micro-batch.
    pub(super) n_tokens: usize,
    /// Id of the run that wrote the file; other programs may omit it.
    pub(super) run: Option<u64>,
    /// Token id of each row.
    pub(super) ids: Vec<u32>,
    /// Rows, and their experts by layer.
    pub(super) experts: RoutedMicro,
}

impl RoutingFile {
    /// Returns the bytes of the file. Equal contents give equal bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let n_rows = self.experts.tokens.len();
        let entry = |name: String, shape| HeaderEntry { name, dtype: Dtype::U32, shape };
        let layers = self.experts.layers.iter();
        let layers = layers
            .map(|(layer_idx, experts)| (entry(format!("{LAYER}{layer_idx}"), vec![n_rows, self.top_k]), experts));
        let tokens = [(ROWS, &self.experts.tokens), (INPUT_IDS, &self.ids)];
        let tokens = tokens.map(|(name, values)| (entry(name.to_owned(), vec![n_rows]), values));
        let (entries, values): (Vec<_>, Vec<_>) = layers.chain(tokens).unzip();
        let data = values.into_iter().map(|values| little_endian(values));
        [Cow::Owned(encode_header(&self.metadata(), entries))].into_iter().chain(data).collect::<Vec<_>>().concat()
    }

    fn metadata(&self) -> Vec<(&'static str, String)> {
        let Self { top_k, n_experts, n_layers, n_tokens, run, .. } = self;
        let numbers = [
            ("format_version", &FORMAT_VERSION),
            ("top_k", top_k),
            ("num_experts", n_experts),
            ("num_layers", n_layers),
            ("num_tokens", n_tokens),
        ];
        let run = run.map(|run| (RUN, run.to_string()));
        numbers.into_iter().map(|(key, number)| (key, number.to_string())).chain(run).collect()
    }

    /// Returns the id of the run that wrote a file; `None` if the file has none, or is damaged. Reads the header alone.
    pub(super) fn run_of(path: &Path) -> io::Result<Option<u64>> {
        let header = read_header(&mut BufReader::new(open_regular_file(path)?));
        Ok(header.ok().and_then(|(_, header)| header.metadata().as_ref()?.get(RUN)?.parse().ok()))
    }

    /// Reads the bytes of a file. The error describes the damage.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let damaged = |error| format!("it is no complete safetensors file: {error}");
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(damaged)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let number = |key: &str| {
            let text = metadata.get(key).ok_or_else(|| format!("its metadata have no {key}"))?;
            text.parse::<u64>().map_err(|_| format!("{key} in its metadata is {text:?}, not a number"))
        };
        let count = |key: &str| number(key).and_then(|n| usize::try_from(n).map_err(|error| error.to_string()));
        let version = count("format_version")?;
        if version != FORMAT_VERSION {
            return Err(format!("its format_version is {version}, and this program reads {FORMAT_VERSION}"));
        }
        let top_k = count("top_k")?;
        let tensors = TensorsOfFile(SafeTensors::deserialize(bytes).map_err(damaged)?);
        let tokens = tensors.vector(ROWS)?;
        let n_rows = tokens.len();
        let ids = tensors.values(INPUT_IDS, &[n_rows])?;
        let mut layers = BTreeMap::new();
        for name in tensors.0.names().into_iter().filter(|name| ![ROWS, INPUT_IDS].contains(name)) {
            let layer_idx = name.strip_prefix(LAYER).and_then(|idx| idx.parse().ok());
            let layer_idx: usize = layer_idx.ok_or_else(|| format!("it has an unknown tensor {name:?}"))?;
            if layers.insert(layer_idx, tensors.values(name, &[n_rows, top_k])?).is_some() {
                return Err(format!("it has {LAYER}{layer_idx} twice"));
            }
        }
        Ok(Self {
            top_k,
            n_experts: count("num_experts")?,
            n_layers: count("num_layers")?,
            n_tokens: count("num_tokens")?,
            run: metadata.contains_key(RUN).then(|| number(RUN)).transpose()?,
            ids,
            experts: RoutedMicro { tokens, layers },
        })
    }

    /// Fails unless the file belongs to a model and to a micro-batch with these token ids.
    pub(super) fn check(&self, model: &RoutedModel, ids: &[u32]) -> Result<(), String> {
        let numbers = [
            ("top_k", self.top_k, model.top_k),
            ("experts", self.n_experts, model.n_experts),
            ("layers with experts", self.n_layers, model.layers.len()),
        ];
        if let Some((what, there, here)) = numbers.into_iter().find(|(_, there, here)| there != here) {
            return Err(format!("it was recorded with {there} {what}, and this model has {here}"));
        }
        if let Some(layer_idx) = self.experts.layers.keys().find(|layer_idx| !model.layers.contains(layer_idx)) {
            return Err(format!("it has {LAYER}{layer_idx}, and this model has no experts in layer {layer_idx}"));
        }
        let data = "the data, their order or max_length differ";
        if self.n_tokens != ids.len() {
            let (there, here) = (self.n_tokens, ids.len());
            return Err(format!("its micro-batch has {there} tokens, and that of this run {here}: {data}"));
        }
        for (row, there) in self.experts.tokens.iter().zip(&self.ids) {
            let here = ids.get(*row as usize).ok_or_else(|| format!("it has row {row} of {} tokens", ids.len()))?;
            if there != here {
                return Err(format!("row {row} has the token id {there}, and in this run {here}: {data}"));
            }
        }
        let mut layers = self.experts.layers.iter();
        layers.try_for_each(|(layer_idx, experts)| self.check_experts(*layer_idx, experts))
    }

    /// Fails unless the experts of each row exist and are different.
    fn check_experts(&self, layer_idx: usize, experts: &[u32]) -> Result<(), String> {
        for (row, experts) in self.experts.tokens.iter().zip(experts.chunks_exact(self.top_k)) {
            for (slot, expert) in experts.iter().enumerate() {
                let place = format_args!("row {row} of {LAYER}{layer_idx}");
                if *expert as usize >= self.n_experts {
                    return Err(format!("{place} has expert {expert}, and there are {}", self.n_experts));
                }
                if experts[..slot].contains(expert) {
                    return Err(format!("{place} has expert {expert} twice"));
                }
            }
        }
        Ok(())
    }
}

/// Tensors of a file.
struct TensorsOfFile<'a>(SafeTensors<'a>);

impl TensorsOfFile<'_> {
    /// Returns a u32 vector of any length.
    fn vector(&self, name: &str) -> Result<Vec<u32>, String> {
        let tensor = self.0.tensor(name).map_err(|_| format!("it has no tensor {name:?}"))?;
        self.values(name, &[tensor.shape().first().copied().unwrap_or_default()])
    }

    /// Returns the values of a u32 tensor of this shape.
    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<u32>, String> {
        let tensor = self.0.tensor(name).map_err(|_| format!("it has no tensor {name:?}"))?;
        if tensor.dtype() != Dtype::U32 || tensor.shape() != shape {
            return Err(format!("{name:?} is {:?} {:?}, not U32 {shape:?}", tensor.dtype(), tensor.shape()));
        }
        Ok(tensor.data().as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn model() -> RoutedModel {
        RoutedModel { top_k: 2, n_experts: 4, layers: vec![1, 2] }
    }

    const IDS: [u32; 3] = [7, 8, 9];

    fn good() -> RoutingFile {
        let layers = BTreeMap::from([(1, vec![0, 3, 2, 1]), (2, vec![1, 0, 3, 2])]);
        let experts = RoutedMicro { tokens: vec![0, 2], layers };
        RoutingFile { top_k: 2, n_experts: 4, n_layers: 2, n_tokens: 3, run: Some(5), ids: vec![7, 9], experts }
    }

    #[test]
    fn a_written_file_is_read_back() {
        let (file, bytes) = (good(), good().encode());
        assert_eq!(RoutingFile::parse(&bytes).unwrap(), file);
        assert_eq!(bytes, file.encode());
        file.check(&model(), &IDS).unwrap();
        let of_others = RoutingFile { run: None, ..file };
        assert_eq!(RoutingFile::parse(&of_others.encode()).unwrap(), of_others);
    }

    #[track_caller]
    fn refused(change: impl Fn(&mut RoutingFile), want: &str) {
        let mut file = good();
        change(&mut file);
        let error = RoutingFile::parse(&file.encode()).and_then(|file| file.check(&model(), &IDS)).unwrap_err();
        assert!(error.contains(want), "{error}");
    }

    #[test]
    fn files_of_other_models_data_and_experts_are_refused() {
        refused(|file| file.n_experts = 8, "it was recorded with 8 experts, and this model has 4");
        refused(|file| file.n_layers = 3, "it was recorded with 3 layers with experts, and this model has 2");
        let one_expert = |file: &mut RoutingFile| {
            file.top_k = 1;
            file.experts.layers.values_mut().for_each(|experts| experts.truncate(2));
        };
        refused(one_expert, "it was recorded with 1 top_k, and this model has 2");
        refused(|file| drop(file.experts.layers.insert(0, vec![0, 1, 2, 3])), "no experts in layer 0");
        refused(|file| file.n_tokens = 4, "its micro-batch has 4 tokens, and that of this run 3");
        refused(|file| file.ids[1] = 6, "row 2 has the token id 6, and in this run 9");
        refused(|file| file.experts.tokens[1] = 3, "it has row 3 of 3 tokens");
        refused(
            |file| file.experts.layers.get_mut(&2).unwrap()[2] = 4,
            "row 2 of layer-2 has expert 4, and there are 4",
        );
        refused(|file| file.experts.layers.get_mut(&1).unwrap()[1] = 0, "row 0 of layer-1 has expert 0 twice");
    }

    #[test]
    fn damaged_files_are_described() {
        let bytes = good().encode();
        let text = |from: &str, to: &str| {
            let header = String::from_utf8_lossy(&bytes[8..]).find(from).unwrap() + 8;
            assert_eq!(from.len(), to.len());
            let mut bytes = bytes.clone();
            bytes[header..header + to.len()].copy_from_slice(to.as_bytes());
            RoutingFile::parse(&bytes).unwrap_err()
        };
        assert!(text("\"format_version\":\"1\"", "\"format_version\":\"2\"").contains("format_version is 2"));
        assert!(text("\"num_experts\":\"4\"", "\"num_experts\":\"x\"").contains("num_experts in its metadata is"));
        assert!(text("\"top_k\"", "\"top_j\"").contains("its metadata have no top_k"));
        assert!(text("\"rows\"", "\"tows\"").contains("it has no tensor \"rows\""));
        assert!(text("layer-2", "mayer-2").contains("unknown tensor \"mayer-2\""));
        assert!(text("\"U32\"", "\"I32\"").contains("not U32"));
        for length in 0..bytes.len() {
            assert!(RoutingFile::parse(&bytes[..length]).unwrap_err().contains("no complete safetensors file"));
        }
    }

    proptest! {
        #[test]
        fn changed_bytes_never_panic(at in 0usize..700, byte: u8) {
            let mut bytes = good().encode();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = RoutingFile::parse(&bytes).and_then(|file| file.check(&model(), &IDS));
        }
    }
}
