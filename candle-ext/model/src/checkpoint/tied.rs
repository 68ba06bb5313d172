//! Tied embeddings that a checkpoint stores twice, or under the name of the output layer.

use std::ops::Range;

use super::Checkpoint;
use super::element;
use super::header::StoredTensor;
use super::reader::MappedShard;
use crate::unit::{EMBEDDING, LM_HEAD};
use crate::{ModelError, ParamSpec};

impl Checkpoint {
    /// Returns the name of the tensor that holds a whole parameter: its own, or that of the output layer for an embedding that is
    /// not stored. transformers loads either of two tied tensors.
    pub(super) fn own_name<'p>(&self, param: &'p ParamSpec) -> &'p str {
        let is_stored = |name: &str| self.shape(name).is_some();
        match param.name == EMBEDDING && !is_stored(EMBEDDING) && is_stored(LM_HEAD) {
            true => LM_HEAD,
            false => &param.name,
        }
    }

    /// Checks that embedding and output layer, of which a tied model reads one, have equal values.
    ///
    /// transformers 5 keeps both if they differ, and transformers 4 the embedding.
    pub(super) fn check_tied(&self) -> Result<(), ModelError> {
        if self.has_equal_values(EMBEDDING, LM_HEAD)? {
            return Ok(());
        }
        let problem = format!(
            "`{LM_HEAD}` differs from `{EMBEDDING}`, but config.json ties them; set tie_word_embeddings to false to use \
             both, as transformers 5 does, or remove `{LM_HEAD}` to use the embedding, as transformers 4 does"
        );
        Err(ModelError::mismatch(self.folder(), problem))
    }

    /// Returns true if two tensors have the same shape and values, in any dtype.
    fn has_equal_values(&self, a: &str, b: &str) -> Result<bool, ModelError> {
        const PIECE: usize = 1 << 20;
        let Some(shape) = self.shape(a).filter(|shape| self.shape(b) == Some(shape)) else { return Ok(false) };
        let [a, b] = [self.entry(a, shape)?, self.entry(b, shape)?];
        let piece = |(file, entry): (&MappedShard, &StoredTensor), elements: Range<usize>| {
            let width = entry.bytes.len() / shape.iter().product::<usize>();
            let at = |element: usize| entry.bytes.start + element * width;
            let bytes = at(elements.start)..at(elements.end);
            let mut values = vec![0f32; elements.len()];
            element::decode(entry.dtype, &file.bytes[bytes.clone()], &mut values);
            file.release(&bytes);
            values
        };
        let n_elements = shape.iter().product::<usize>();
        let pieces = (0..n_elements).step_by(PIECE).map(|start| start..n_elements.min(start + PIECE));
        Ok(pieces.into_iter().all(|elements| piece(a, elements.clone()) == piece(b, elements)))
    }
}
