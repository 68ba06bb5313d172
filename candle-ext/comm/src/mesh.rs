//! Device mesh: coordinates of the ranks on the parallelism axes, and the process groups along them.
//!
//! The last axis varies fastest, in the order pp, dp_replicate, dp_shard, cp, sp, tp. Axes with the most communication have
//! neighbouring ranks, so that tensor parallel ranks share a node. Experts use another layout of one pipeline stage's ranks,
//! in the order edp, ep, etp (parallel folding): an expert parallel group spans data, context and tensor ranks.

use std::fmt;
use std::sync::Arc;

use crate::{Collective, Result};

/// Axis of parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Pipeline parallel: each rank has some of the blocks.
    Pp,
    /// Data parallel with replicated parameters.
    DpReplicate,
    /// Data parallel with sharded optimizer states, gradients or parameters.
    DpShard,
    /// Context parallel: each rank has a part of each sequence, and keys and values circulate (ring attention).
    Cp,
    /// Ulysses sequence parallel: each rank has a part of each sequence, and in attention some heads of the whole sequence.
    Sp,
    /// Tensor parallel: each rank has a shard of each matrix.
    Tp,
    /// Expert data parallel: ranks with the same experts. Its degree follows from the others.
    Edp,
    /// Expert parallel: each rank has some of the experts.
    Ep,
    /// Expert tensor parallel: each rank has a shard of each expert's matrices.
    Etp,
}

impl Axis {
    /// Axes of the dense parameters, slowest first.
    pub const DENSE: [Self; 6] = [Self::Pp, Self::DpReplicate, Self::DpShard, Self::Cp, Self::Sp, Self::Tp];
    /// Axes of the experts, slowest first.
    pub const EXPERT: [Self; 4] = [Self::Pp, Self::Edp, Self::Ep, Self::Etp];

    /// Axes with a configured degree. The degree of `Edp` follows from them.
    const GIVEN: [Self; 8] =
        [Self::Pp, Self::DpReplicate, Self::DpShard, Self::Cp, Self::Sp, Self::Tp, Self::Ep, Self::Etp];

    /// Returns the axis's name in recipes and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pp => "pp",
            Self::DpReplicate => "dp_replicate",
            Self::DpShard => "dp_shard",
            Self::Cp => "cp",
            Self::Sp => "sp",
            Self::Tp => "tp",
            Self::Edp => "edp",
            Self::Ep => "ep",
            Self::Etp => "etp",
        }
    }
}

/// Degree of parallelism along each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Degrees {
    /// Number of pipeline stages.
    pub pp: usize,
    /// Number of replicas.
    pub dp_replicate: usize,
    /// Number of data parallel shards.
    pub dp_shard: usize,
    /// Number of parts of a sequence in ring attention.
    pub cp: usize,
    /// Number of parts of a sequence in Ulysses attention.
    pub sp: usize,
    /// Number of shards of a matrix.
    pub tp: usize,
    /// Number of ranks among which the experts are divided.
    pub ep: usize,
    /// Number of shards of an expert's matrix.
    pub etp: usize,
}

impl Default for Degrees {
    fn default() -> Self {
        Self { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, sp: 1, tp: 1, ep: 1, etp: 1 }
    }
}

impl Degrees {
    /// Returns the number of ranks.
    pub fn n_ranks(&self) -> usize {
        self.pp * self.n_stage()
    }

    /// Returns the degree of an axis.
    pub fn of(&self, axis: Axis) -> usize {
        match axis {
            Axis::Pp => self.pp,
            Axis::DpReplicate => self.dp_replicate,
            Axis::DpShard => self.dp_shard,
            Axis::Cp => self.cp,
            Axis::Sp => self.sp,
            Axis::Tp => self.tp,
            Axis::Edp => self.n_stage() / (self.ep * self.etp),
            Axis::Ep => self.ep,
            Axis::Etp => self.etp,
        }
    }

    /// Returns the number of ranks of one pipeline stage.
    fn n_stage(&self) -> usize {
        self.dp_replicate * self.dp_shard * self.cp * self.sp * self.tp
    }
}

/// Error of degrees that do not match the world.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// A degree is zero.
    #[error("{0}: expected a degree of at least 1, found 0")]
    Zero(&'static str),
    /// The degrees need another number of ranks.
    #[error("{degrees} needs {wanted} ranks, and the world has {n_ranks}")]
    WorldSize {
        /// Configured degrees.
        degrees: Degrees,
        /// Number of ranks that they need.
        wanted: usize,
        /// World size.
        n_ranks: usize,
    },
    /// The expert axes do not divide the ranks of a pipeline stage.
    #[error("ep {ep} x etp {etp} does not divide the {n_stage} ranks of a pipeline stage")]
    Experts {
        /// Degree of expert parallelism.
        ep: usize,
        /// Degree of expert tensor parallelism.
        etp: usize,
        /// Number of ranks of one pipeline stage.
        n_stage: usize,
    },
}

/// Device mesh of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    degrees: Degrees,
}

impl Mesh {
    /// Creates a mesh of exactly `n_ranks` ranks.
    pub fn new(degrees: Degrees, n_ranks: usize) -> Result<Self, MeshError> {
        if let Some(axis) = Axis::GIVEN.into_iter().find(|axis| degrees.of(*axis) == 0) {
            return Err(MeshError::Zero(axis.name()));
        }
        let (wanted, n_stage) = (degrees.n_ranks(), degrees.n_stage());
        if wanted != n_ranks {
            return Err(MeshError::WorldSize { degrees, wanted, n_ranks });
        }
        let Degrees { ep, etp, .. } = degrees;
        if !n_stage.is_multiple_of(ep * etp) {
            return Err(MeshError::Experts { ep, etp, n_stage });
        }
        Ok(Self { degrees })
    }

    /// Returns the degrees.
    pub fn degrees(&self) -> &Degrees {
        &self.degrees
    }

    /// Returns the coordinate of `rank` along `axis`.
    pub fn coordinate(&self, rank: usize, axis: Axis) -> usize {
        rank / self.stride(axis) % self.degrees.of(axis)
    }

    /// Returns the groups of ranks that differ along `axes` only: one list per group, in rank order.
    ///
    /// # Panics
    ///
    /// If `axes` mixes dense and expert axes.
    pub fn lists(&self, axes: &[Axis]) -> Vec<Vec<usize>> {
        let all: &[Axis] = match axes.iter().all(|axis| Axis::DENSE.contains(axis)) {
            true => &Axis::DENSE,
            false => &Axis::EXPERT,
        };
        assert!(axes.iter().all(|axis| all.contains(axis)), "{axes:?} mix dense and expert axes");
        let others: Vec<Axis> = all.iter().copied().filter(|axis| !axes.contains(axis)).collect();
        let of =
            |rank: usize| others.iter().fold(0, |at, axis| at * self.degrees.of(*axis) + self.coordinate(rank, *axis));
        let n_lists = others.iter().map(|axis| self.degrees.of(*axis)).product();
        let mut lists = vec![Vec::new(); n_lists];
        for rank in 0..self.degrees.n_ranks() {
            lists[of(rank)].push(rank);
        }
        lists
    }

    /// Creates this rank's process group along `axes`. `world` is the group of all ranks.
    ///
    /// Collective: all ranks create the same groups in the same order.
    pub fn group(&self, world: &dyn Collective, axes: &[Axis]) -> Result<Arc<dyn Collective>> {
        let name: Vec<&str> = axes.iter().map(|axis| axis.name()).collect();
        world.split(&name.join("-"), &self.lists(axes))
    }

    /// Returns the rank distance between neighbours along an axis.
    fn stride(&self, axis: Axis) -> usize {
        let all: &[Axis] = if Axis::DENSE.contains(&axis) { &Axis::DENSE } else { &Axis::EXPERT };
        all.iter().rev().take_while(|other| **other != axis).map(|other| self.degrees.of(*other)).product()
    }
}

impl fmt::Display for Degrees {
    /// Formats the degrees other than one: `dp_shard 4 x tp 2`. Expert degrees follow separately.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let above = |axes: &[Axis]| {
            let above = axes.iter().filter(|axis| self.of(**axis) != 1);
            above.map(|axis| format!("{} {}", axis.name(), self.of(*axis))).collect::<Vec<_>>().join(" x ")
        };
        let (dense, experts) = (above(&Axis::DENSE), above(&[Axis::Ep, Axis::Etp]));
        f.write_str(if dense.is_empty() { "one rank" } else { &dense })?;
        if experts.is_empty() { Ok(()) } else { write!(f, ", experts {experts}") }
    }
}

/// Largest number of ranks in a table.
const SHOWN: usize = 64;

/// Formats a table with one line per rank: its coordinate on each axis with a degree other than one.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<Axis> = Axis::GIVEN.into_iter().filter(|axis| self.degrees.of(*axis) != 1).collect();
        write!(f, "rank")?;
        axes.iter().try_for_each(|axis| write!(f, "  {}", axis.name()))?;
        for rank in 0..self.degrees.n_ranks().min(SHOWN) {
            write!(f, "\n{rank:4}")?;
            axes.iter().try_for_each(|axis| write!(f, "  {:1$}", self.coordinate(rank, *axis), axis.name().len()))?;
        }
        match self.degrees.n_ranks().saturating_sub(SHOWN) {
            0 => Ok(()),
            n_more => write!(f, "\nand {n_more} more"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::{Options, Reduce, threads};

    /// Returns every mesh of up to 24 ranks with dense degrees up to 3 and all valid expert degrees.
    fn meshes() -> Vec<Mesh> {
        let mut found = Vec::new();
        for at in 0..3usize.pow(6) * 16 {
            let digit = |i: u32| at / 16 / 3usize.pow(i) % 3 + 1;
            let degrees = Degrees {
                pp: digit(0),
                dp_replicate: digit(1),
                dp_shard: digit(2),
                cp: digit(3),
                sp: digit(4),
                tp: digit(5),
                ep: at % 4 + 1,
                etp: at / 4 % 4 + 1,
            };
            if degrees.n_ranks() <= 24 {
                found.extend(Mesh::new(degrees, degrees.n_ranks()));
            }
        }
        assert!(found.len() > 300, "{}", found.len());
        found
    }

    #[test]
    fn coordinates_are_unique_and_less_than_their_degrees() {
        for mesh in meshes() {
            for axes in [&Axis::DENSE[..], &Axis::EXPERT] {
                let coordinates: HashSet<Vec<usize>> = (0..mesh.degrees.n_ranks())
                    .map(|rank| axes.iter().map(|axis| mesh.coordinate(rank, *axis)).collect())
                    .collect();
                assert_eq!(coordinates.len(), mesh.degrees.n_ranks(), "{mesh:?}");
                let in_degree =
                    |coordinates: &Vec<usize>| coordinates.iter().zip(axes).all(|(at, a)| *at < mesh.degrees.of(*a));
                assert!(coordinates.iter().all(in_degree), "{mesh:?}");
            }
        }
    }

    #[test]
    fn groups_are_a_partition_along_their_axes() {
        for mesh in meshes() {
            for axes in [
                &[Axis::Tp] as &[Axis],
                &[Axis::DpShard, Axis::Cp, Axis::Sp],
                &[Axis::DpReplicate],
                &[Axis::Pp],
                &[Axis::Ep],
                &[Axis::Edp, Axis::Etp],
                &[],
                &Axis::DENSE,
            ] {
                let lists = mesh.lists(axes);
                let all: HashSet<usize> = lists.iter().flatten().copied().collect();
                assert_eq!(all, (0..mesh.degrees.n_ranks()).collect(), "{mesh:?} {axes:?}");
                let size: usize = axes.iter().map(|axis| mesh.degrees.of(*axis)).product();
                for list in lists {
                    assert_eq!(list.len(), size, "{mesh:?} {axes:?}");
                    assert!(list.is_sorted());
                    let dense = axes.iter().all(|axis| Axis::DENSE.contains(axis));
                    let others = if dense { &Axis::DENSE[..] } else { &Axis::EXPERT };
                    for axis in others.iter().filter(|axis| !axes.contains(axis)) {
                        assert!(
                            list.iter().all(|rank| mesh.coordinate(*rank, *axis) == mesh.coordinate(list[0], *axis))
                        );
                    }
                }
            }
        }
    }

    /// Megatron-LM's order: tensor parallel ranks are neighbours, and pipeline stages are farthest apart.
    #[test]
    fn the_order_of_the_ranks_is_the_documented_one() {
        let mesh = Mesh::new(Degrees { pp: 2, dp_shard: 2, tp: 2, ep: 4, ..Degrees::default() }, 8).unwrap();
        assert_eq!(mesh.lists(&[Axis::Tp]), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert_eq!(mesh.lists(&[Axis::DpShard]), [[0, 2], [1, 3], [4, 6], [5, 7]]);
        assert_eq!(mesh.lists(&[Axis::Pp]), [[0, 4], [1, 5], [2, 6], [3, 7]]);
        assert_eq!(mesh.lists(&[Axis::Ep]), [[0, 1, 2, 3], [4, 5, 6, 7]]);
        assert_eq!(mesh.lists(&[Axis::DpReplicate]), [[0], [1], [2], [3], [4], [5], [6], [7]]);
    }

    #[test]
    fn a_mesh_is_formatted_as_a_table_of_coordinates() {
        let mesh = Mesh::new(Degrees { pp: 2, tp: 2, ..Degrees::default() }, 4).unwrap();
        assert_eq!(mesh.to_string(), "rank  pp  tp\n   0   0   0\n   1   0   1\n   2   1   0\n   3   1   1");
        let experts = Mesh::new(Degrees { dp_shard: 2, tp: 2, ep: 2, etp: 2, ..Degrees::default() }, 4).unwrap();
        let (degrees, table) = (experts.degrees().to_string(), experts.to_string());
        assert_eq!(degrees, "dp_shard 2 x tp 2, experts ep 2 x etp 2");
        assert!(table.starts_with("rank  dp_shard  tp  ep  etp\n   0         0   0   0    0\n"), "{table}");
        assert!(table.ends_with("\n   3         1   1   1    1"), "{table}");
        let many = Mesh::new(Degrees { dp_shard: 100, ..Degrees::default() }, 100).unwrap().to_string();
        assert!(many.ends_with("  63        63\nand 36 more"), "{many}");
    }

    #[test]
    fn invalid_degrees_are_rejected_with_the_numbers() {
        let refused = |degrees: Degrees, n_ranks| Mesh::new(degrees, n_ranks).unwrap_err().to_string();
        let two = Degrees { dp_shard: 2, tp: 2, ..Degrees::default() };
        assert_eq!(refused(two, 8), "dp_shard 2 x tp 2 needs 4 ranks, and the world has 8");
        assert_eq!(refused(Degrees::default(), 2), "one rank needs 1 ranks, and the world has 2");
        assert_eq!(refused(Degrees { cp: 0, ..two }, 0), "cp: expected a degree of at least 1, found 0");
        let experts = Degrees { ep: 3, ..two };
        assert_eq!(refused(experts, 4), "ep 3 x etp 1 does not divide the 4 ranks of a pipeline stage");
    }

    #[test]
    #[should_panic(expected = "mix dense and expert axes")]
    fn a_group_of_dense_and_expert_axes_panics() {
        Mesh::new(Degrees::default(), 1).unwrap().lists(&[Axis::Tp, Axis::Ep]);
    }

    #[test]
    fn groups_connect_the_ranks_of_their_lists() {
        let degrees = Degrees { dp_shard: 2, sp: 2, ..Degrees::default() };
        let sums = threads::run(4, Options::default(), |world| -> Result<Vec<u32>> {
            let mesh = Mesh::new(degrees, 4).unwrap();
            let rank = candle_core::Tensor::new(world.rank() as u32, &candle_core::Device::Cpu)?;
            [&[Axis::Sp] as &[Axis], &[Axis::DpShard], &[Axis::DpShard, Axis::Sp], &[Axis::Tp]]
                .into_iter()
                .map(|axes| Ok(mesh.group(&*world.group(), axes)?.all_reduce(&rank, Reduce::Sum)?.to_scalar()?))
                .collect()
        });
        assert_eq!(sums.unwrap(), [[1, 2, 6, 0], [1, 4, 6, 1], [5, 2, 6, 2], [5, 4, 6, 3]]);
    }
}
