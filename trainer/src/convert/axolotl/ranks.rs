//! axolotl's degrees of parallelism.

use serde_json::Value as Json;

use crate::convert::converter::Converter;
use crate::convert::item::ForeignItem;

pub(super) fn degree(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let Some(n) = converter.degree(item) else { return };
    match item.name() {
        "tensor_parallel_size" => converter.map(item, [("tensor_parallel_size", n.into())]),
        _ => converter.map(item, [("context_parallel_size", n.into())]),
    }
}

pub(super) fn dp_shard(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let Some(n) = converter.degree(item) else { return };
    let note = format!("ZeRO stage 3 shards over the ranks of a group; start {} ranks", converter.n_ranks);
    let settings = [
        ("deepspeed.zero_optimization.stage", Json::from(3)),
        ("deepspeed.zero_optimization.mics_shard_size", n.into()),
    ];
    converter.change(item, settings, &note);
}

pub(super) fn dp_replicate(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    if converter.degree(item).is_none() {
        return;
    }
    converter.built_in(item, "the ranks that are started decide the number of replicas");
}
