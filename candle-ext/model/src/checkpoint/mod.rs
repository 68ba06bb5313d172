//! Hugging Face checkpoints: safetensors, config.json and tokenizer files.
//!
//! Reading memory-maps the files and converts one tensor at a time. Writing streams one tensor at a time, and the
//! folder appears atomically.

mod carried;
mod durable;
mod element;
mod folder_lock;
mod header;
mod identity;
mod index;
mod reader;
mod staging;
mod tied;
mod unfinished;
mod writer;
mod written;

pub use carried::CarriedTensors;
pub use durable::DurableFile;
pub(crate) use element::with_elements;
pub use element::{Element, little_endian};
pub use header::{HeaderEntry, encode_header, read_header};
pub use reader::Checkpoint;
pub(crate) use reader::first_names;
pub use staging::StagingFolder;
pub use unfinished::{UNFINISHED_MARKER, mark_unfinished, remove_unfinished, unmark_finished};
pub use writer::{AuxiliaryFiles, CheckpointExport, DEFAULT_SHARD_BYTES, ExpertTensors};
pub(crate) use writer::{ShardTensor, dtype_on_disk, write_json, write_shard};
pub(crate) use written::{WrittenTensors, sum_of_squares};
