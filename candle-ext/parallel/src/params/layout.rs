//! Flat-buffer layout of parameters: group and offsets of each, without tensors.
//!
//! A unit has one flat buffer for each parameter group, padded with zeros for alignment. Trainable parameters of one
//! optimizer group and weight decay are adjacent, so that each run of them needs one optimizer call.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};
use candlewick_model::{AdapterSpec, FsdpUnit, LinearSpec, ParamGroupKind, ParamSpec, TiedParam};
use candlewick_ops::{ShardPosition, WeightStorage};

use super::offload::UnitOffload;
use super::options::{StoreMode, StoreOptions};
use super::sharding::{ALIGNMENT, GroupRanks, ShardingGroups};
use super::whole_matrices::whole_matrix_shard_len;
use crate::optimizer::{OptimizerGroups, OptimizerKind, UpdateNeed};
use crate::placement::{Placement, Slice};

/// Layout of all parameters, and this stage's parameter groups.
pub(crate) struct ParamLayout {
    /// Units of the whole model.
    pub(crate) units: Vec<FsdpUnit>,
    /// Units of this stage, and units that its head ties.
    stage_units: Vec<Option<StageUnit>>,
    /// Parameter groups of the stage, in unit order.
    pub(crate) groups: Vec<ParamGroup>,
    pub(crate) sharding: ShardingGroups,
}

/// A unit of this stage.
struct StageUnit {
    /// The unit without parameters that only other ranks use.
    used: FsdpUnit,
    /// Indices of its parameter groups.
    groups: Range<usize>,
    /// Group and position of each parameter, by name.
    partition: BTreeMap<String, (usize, usize)>,
}

/// Parameters of one unit with the same process groups and storage: one flat buffer.
pub(crate) struct ParamGroup {
    pub(crate) kind: ParamGroupKind,
    pub(crate) is_trainable: bool,
    pub(crate) storage: WeightStorage,
    pub(crate) ranks: GroupRanks,
    pub(crate) offload: UnitOffload,
    /// Parameters in buffer order.
    pub(crate) params: Vec<PlacedParam>,
    /// Elements of the padded buffer; bytes if it is quantized.
    pub(crate) numel: usize,
    /// This rank's shard of the buffer.
    pub(crate) shard: Range<usize>,
    /// Optimizer of all parameters; `None` if they are frozen.
    pub(crate) optimizer: Option<Arc<dyn OptimizerKind>>,
    /// True if all parameters are weights that ranks gather as FP8 codes.
    pub(crate) gathers_fp8: bool,
}

/// Settings of the optimizer that updates a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ParamSetting {
    /// Index of the optimizer group.
    pub(crate) group_idx: usize,
    pub(crate) weight_decay: f64,
}

/// Properties that all groups of a unit share.
struct PlaceContext<'o> {
    mode: StoreMode,
    optimizer: &'o OptimizerGroups,
    offload: UnitOffload,
    /// Names of the weights that ranks gather as FP8 codes.
    fp8_gathered: BTreeSet<String>,
}

/// A parameter in its group's flat buffer.
pub(crate) struct PlacedParam {
    pub(crate) spec: ParamSpec,
    pub(crate) placement: Placement,
    /// Elements in the buffer, padded to the largest shard of any rank.
    pub(crate) range: Range<usize>,
    pub(crate) setting: ParamSetting,
}

impl ParamLayout {
    /// Lays out the parameters of `units`.
    pub(crate) fn new(units: &[FsdpUnit], options: &StoreOptions, sharding: ShardingGroups) -> Result<Self> {
        let mut layout = Self { units: units.to_vec(), stage_units: Vec::new(), groups: Vec::new(), sharding };
        for (unit_idx, offload) in options.cpu_offload.of_units(units).into_iter().enumerate() {
            let fp8_gathered = if options.fp8_param_gather { fp8_weights(&units[unit_idx]) } else { BTreeSet::new() };
            let context = PlaceContext { mode: options.mode, optimizer: &options.optimizer, offload, fp8_gathered };
            let stage_unit = layout.has(unit_idx).then(|| layout.place(&units[unit_idx], &context)).transpose()?;
            layout.stage_units.push(stage_unit);
        }
        Ok(layout)
    }

    /// Adds the parameter groups of a unit.
    fn place(&mut self, unit: &FsdpUnit, context: &PlaceContext<'_>) -> Result<StageUnit> {
        let first = self.groups.len();
        for kind in ParamGroupKind::ALL {
            let (trainable, frozen): (Vec<&ParamSpec>, Vec<&ParamSpec>) =
                unit.params.iter().filter(|spec| spec.group == kind).partition(|spec| context.mode.trains(spec));
            for specs in context.by_storage(frozen).iter().chain(&context.by_storage(trainable)) {
                self.groups.push(ParamGroup::new(specs, context, &self.sharding)?);
            }
        }
        let mut used = unit.clone();
        let mut partition = BTreeMap::new();
        for (i, group) in self.groups[first..].iter().enumerate() {
            for (param_idx, param) in group.params.iter().enumerate() {
                partition.insert(param.spec.name.clone(), (first + i, param_idx));
                if param.placement == Placement::Rank0Only && group.ranks.tensor.rank() > 0 {
                    used.remove_bias(&param.spec.name);
                }
            }
        }
        Ok(StageUnit { used, groups: first..self.groups.len(), partition })
    }

    /// Returns true if this stage has the unit or ties it.
    pub(crate) fn has(&self, unit_idx: usize) -> bool {
        let stages = &self.sharding.stages;
        let head = self.units.len() - 1;
        let is_borrowed = || self.units[head].tied.iter().any(|tied| tied.owner == unit_idx);
        stages.owns(unit_idx) || (stages.owns(head) && is_borrowed())
    }

    /// Returns true if this stage owns the unit.
    pub(crate) fn owns(&self, unit_idx: usize) -> bool {
        self.sharding.stages.owns(unit_idx)
    }

    /// Returns a unit of this stage without parameters that only other ranks use.
    pub(crate) fn used(&self, unit_idx: usize) -> Option<&FsdpUnit> {
        self.stage_units.get(unit_idx)?.as_ref().map(|unit| &unit.used)
    }

    /// Returns the indices of a unit's groups; empty on other stages.
    pub(crate) fn groups_of(&self, unit_idx: usize) -> Range<usize> {
        self.stage_units.get(unit_idx).and_then(Option::as_ref).map_or(0..0, |unit| unit.groups.clone())
    }

    /// Returns the indices of the groups of a unit and of the units that it ties; empty on other stages.
    pub(crate) fn groups_with_borrowed(&self, unit_idx: usize) -> impl Iterator<Item = usize> {
        let tied = self.used(unit_idx).into_iter().flat_map(|unit| &unit.tied);
        self.groups_and_ties(unit_idx, tied)
    }

    /// Returns the indices of the groups whose weights a unit reads; empty on other stages.
    pub(crate) fn groups_to_read(&self, unit_idx: usize) -> impl Iterator<Item = usize> {
        self.groups_and_ties(unit_idx, self.used(unit_idx).into_iter().flat_map(FsdpUnit::read_ties))
    }

    fn groups_and_ties<'a>(
        &'a self,
        unit_idx: usize,
        tied: impl Iterator<Item = &'a TiedParam>,
    ) -> impl Iterator<Item = usize> {
        [unit_idx].into_iter().chain(tied.map(|tied| tied.owner)).flat_map(|unit_idx| self.groups_of(unit_idx))
    }

    /// Returns the indices of the trainable groups that another unit ties.
    pub(crate) fn tied_groups(&self) -> impl Iterator<Item = usize> {
        let tied: BTreeSet<usize> = self.units.iter().flat_map(|unit| &unit.tied).map(|tied| tied.owner).collect();
        let groups = tied.into_iter().flat_map(|unit_idx| self.groups_of(unit_idx));
        groups.filter(|group_idx| self.groups[*group_idx].is_trainable)
    }

    /// Returns the trainable groups of this stage with their indices.
    pub(crate) fn trainable(&self) -> impl Iterator<Item = (usize, &ParamGroup)> {
        self.groups.iter().enumerate().filter(|(_, group)| group.is_trainable)
    }

    /// Returns the parameter group kinds of the model with their process groups. Dense is always included.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = (ParamGroupKind, &GroupRanks)> {
        let has = |kind| self.units.iter().flat_map(|unit| &unit.params).any(|spec| spec.group == kind);
        let kinds = ParamGroupKind::ALL.into_iter().filter(move |kind| *kind == ParamGroupKind::Dense || has(*kind));
        kinds.filter_map(|kind| Some((kind, self.sharding.ranks(kind)?)))
    }

    /// Returns a parameter of a unit that this stage has, with its group and the group's index.
    pub(crate) fn find(&self, unit_idx: usize, name: &str) -> (usize, &ParamGroup, &PlacedParam) {
        let unit = self.stage_units[unit_idx].as_ref().expect("this stage has the unit");
        let (group_idx, param_idx) = unit.partition[name];
        (group_idx, &self.groups[group_idx], &self.groups[group_idx].params[param_idx])
    }
}

impl ParamGroup {
    /// Lays out `specs`, which have one kind and storage and are all trainable or all frozen.
    fn new(specs: &[&ParamSpec], context: &PlaceContext<'_>, sharding: &ShardingGroups) -> Result<Self> {
        let PlaceContext { mode, offload, ref fp8_gathered, .. } = *context;
        let (kind, is_trainable, ranks) = (specs[0].group, mode.trains(specs[0]), sharding.ranks_of(specs[0])?.clone());
        let storage = specs[0].storage;
        if is_trainable && storage != WeightStorage::Dense {
            bail!("{} is quantized and cannot be trained; freeze it", specs[0].name)
        }
        let optimizer = is_trainable.then(|| Arc::clone(&context.optimizer.group_of(specs[0]).kind));
        let (mut params, mut end) = (Vec::new(), 0);
        for (spec, setting) in context.in_buffer_order(specs) {
            let placement = Placement::of(spec, sharding.sequence_parallel, ranks.split_rank())?;
            let range = end..end + storage.n_elements(&placement.max_shape(&spec.shape))?;
            end = range.end.next_multiple_of(ALIGNMENT);
            params.push(PlacedParam { spec: spec.clone(), placement, range, setting });
        }
        let numel = match &optimizer {
            Some(optimizer) if optimizer.need() == UpdateNeed::WholeMatrices => spread(&mut params, ranks.shard.size()),
            Some(_) | None => ranks.padded(end),
        };
        let shard = ranks.own(numel);
        let gathers_fp8 = fp8_gathered.contains(&specs[0].name);
        Ok(Self { kind, is_trainable, storage, ranks, offload, params, numel, shard, optimizer, gathers_fp8 })
    }

    /// Returns the runs of adjacent parameters with equal settings in this rank's shard. Padding after a parameter is part of
    /// its run.
    pub(crate) fn runs(&self) -> Vec<(Range<usize>, ParamSetting)> {
        let mut runs: Vec<(usize, ParamSetting)> = Vec::new();
        for param in &self.params {
            if runs.last().is_none_or(|(_, setting)| *setting != param.setting) {
                runs.push((param.range.start, param.setting));
            }
        }
        let ends = runs.iter().skip(1).map(|(start, _)| *start).chain([self.numel]);
        let in_shard = |at: usize| at.clamp(self.shard.start, self.shard.end) - self.shard.start;
        let clamped = runs.iter().zip(ends).map(|((start, setting), end)| (in_shard(*start)..in_shard(end), *setting));
        clamped.filter(|(range, _)| !range.is_empty()).collect()
    }

    /// Returns true if another group has the same parameters at the same positions.
    pub(crate) fn has_layout_of(&self, other: &Self) -> bool {
        let position = |param: &PlacedParam| (param.spec.name.clone(), param.spec.shape.clone(), param.range.clone());
        (self.kind, self.storage, self.numel, &self.shard) == (other.kind, other.storage, other.numel, &other.shard)
            && self.params.iter().map(position).eq(other.params.iter().map(position))
    }

    /// Returns the ranges of these parameters within this rank's shard.
    pub(crate) fn in_shard<'a>(
        &'a self,
        is_wanted: impl Fn(&PlacedParam) -> bool + 'a,
    ) -> impl Iterator<Item = Range<usize>> + 'a {
        let Range { start, end } = self.shard;
        let ranges = self.params.iter().filter(move |param| is_wanted(param)).map(|param| &param.range);
        let pieces = ranges.map(move |range| range.start.max(start)..range.end.min(end));
        pieces.filter(|piece| !piece.is_empty()).map(move |piece| piece.start - start..piece.end - start)
    }
}

impl PlacedParam {
    /// Returns the shape of this rank's slice.
    pub(crate) fn shape(&self) -> Vec<usize> {
        self.placement.shape(&self.spec.shape)
    }

    /// Returns the number of elements of this rank's slice.
    pub(crate) fn n_elements(&self) -> usize {
        self.spec.storage.n_elements(&self.shape()).expect("the layout has checked the shape")
    }

    /// Returns the intersection of this rank's slice with a shard, in buffer elements.
    pub(crate) fn piece(&self, shard: &Range<usize>) -> Option<Range<usize>> {
        let end = self.range.start + self.n_elements();
        let piece = self.range.start.max(shard.start)..end.min(shard.end);
        (!piece.is_empty()).then_some(piece)
    }

    /// Returns the experts whose matrices this rank holds, of a parameter of `n_experts` experts.
    pub(crate) fn experts(&self, n_experts: usize) -> Range<usize> {
        // A row of the slice's matrix is a row of an expert's matrix, or all of it.
        let expert_at = |row: usize, n_rows: usize| row * n_experts / n_rows;
        match self.placement.slice() {
            Some(Slice { matrix: [n_rows, _], rows, .. }) => {
                expert_at(rows.start, *n_rows)..expert_at(rows.start + rows.len, *n_rows)
            }
            None => 0..n_experts,
        }
    }

    /// Returns the position of a piece of this rank's slice, in buffer elements, in the whole parameter.
    pub(crate) fn position(&self, piece: &Range<usize>) -> ShardPosition {
        let width = self.spec.shape.last().copied().unwrap_or(1);
        let start = piece.start - self.range.start;
        match self.placement.slice() {
            Some(Slice { matrix: [_, row_len], rows, columns }) if self.spec.shape.len() > 1 => ShardPosition {
                row_len: *row_len,
                columns: columns.start..columns.start + columns.len,
                first: rows.start * columns.len + start,
            },
            slice => {
                let first = slice.map_or(0, |slice| slice.rows.start) + start;
                ShardPosition { row_len: width, columns: 0..width, first }
            }
        }
    }
}

impl PlaceContext<'_> {
    /// Returns the settings of a parameter's optimizer.
    fn setting(&self, spec: &ParamSpec) -> ParamSetting {
        ParamSetting { group_idx: self.optimizer.index_of(spec), weight_decay: self.optimizer.weight_decay(spec) }
    }

    /// Orders parameters by optimizer group and whether weight decay applies, and keeps their order otherwise. Frozen ones stay
    /// in their order.
    fn in_buffer_order<'s>(&self, specs: &[&'s ParamSpec]) -> Vec<(&'s ParamSpec, ParamSetting)> {
        let mut all: Vec<_> = specs.iter().map(|spec| (*spec, self.setting(spec))).collect();
        all.sort_by_key(|(spec, setting)| match self.mode.trains(spec) {
            true => (setting.group_idx, !spec.decay),
            false => (0, false),
        });
        all
    }

    /// Groups parameters by storage, by the dtype of their all-gather and by the kind of optimizer, in order of first occurrence.
    /// For inference, an adapter has groups of its own, so that several adapters can share the other groups.
    fn by_storage<'s>(&self, specs: Vec<&'s ParamSpec>) -> Vec<Vec<&'s ParamSpec>> {
        let is_adapter = |spec: &ParamSpec| self.mode == StoreMode::Infer && AdapterSpec::owns(&spec.name);
        let kind = |spec: &ParamSpec| self.mode.trains(spec).then(|| self.optimizer.group_of(spec).kind.name());
        let key =
            |spec: &ParamSpec| (spec.storage, self.fp8_gathered.contains(&spec.name), is_adapter(spec), kind(spec));
        let mut groups: Vec<Vec<&ParamSpec>> = Vec::new();
        for spec in specs {
            match groups.iter_mut().find(|group| key(group[0]) == key(spec)) {
                Some(group) => group.push(spec),
                None => groups.push(vec![spec]),
            }
        }
        groups
    }
}

/// Moves parameters so that each is in one of `n_shards` equal shards, in the same order. Returns the elements of all shards.
fn spread(params: &mut [PlacedParam], n_shards: usize) -> usize {
    let sizes: Vec<usize> = params.iter().map(|param| param.range.len()).collect();
    let shard_len = whole_matrix_shard_len(&sizes, n_shards);
    let mut end: usize = 0;
    for param in params {
        let n = param.range.len();
        let is_cut = end / shard_len != (end + n - 1) / shard_len;
        let start = if is_cut { end.next_multiple_of(shard_len) } else { end };
        param.range = start..start + n;
        end = param.range.end.next_multiple_of(ALIGNMENT);
    }
    shard_len * n_shards
}

/// Returns the names of a unit's dense weights that multiply in FP8. Experts are not among them, nor are quantized weights,
/// which have a byte per element already.
fn fp8_weights(unit: &FsdpUnit) -> BTreeSet<String> {
    let linears = unit.layer().into_iter().flat_map(|layer| layer.linears().filter(|linear| linear.fp8));
    let names: BTreeSet<String> = linears.map(LinearSpec::weight_name).collect();
    let is_gathered = |spec: &&ParamSpec| {
        spec.group == ParamGroupKind::Dense && spec.storage == WeightStorage::Dense && names.contains(&spec.name)
    };
    unit.params.iter().filter(is_gathered).map(|spec| spec.name.clone()).collect()
}
