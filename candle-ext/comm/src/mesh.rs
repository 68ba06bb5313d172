//! Which part of the work each rank has: pure arithmetic on rank numbers, and the groups that follow from it.
//!
//! Ranks are numbered with the last axis fastest, in the order pp, dp_replicate, dp_shard, cp, sp, tp: what talks most lies
//! closest, tensor parallel ranks on one machine. Experts fold the ranks of one pipeline stage anew, in the order edp, ep,
//! etp: an expert parallel group runs through data, context and tensor ranks.

use std::fmt;
use std::sync::Arc;

use crate::{Collective, Result};

/// A way in which ranks share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Pipeline: a rank has some of the blocks.
    Pp,
    /// Data parallel, everything kept by each rank.
    DpReplicate,
    /// Data parallel, optimizer state, gradients or weights kept in shards.
    DpShard,
    /// Context: a rank has a part of each sequence, keys and values go around (ring attention).
    Cp,
    /// Sequence: a rank has a part of each sequence, and some heads of all of it in attention (Ulysses).
    Sp,
    /// Tensor: a rank has a part of each matrix.
    Tp,
    /// Expert data parallel: ranks that have the same experts. Its degree follows from the others.
    Edp,
    /// Expert: a rank has some of the experts.
    Ep,
    /// Expert tensor: a rank has a part of each expert's matrices.
    Etp,
}

impl Axis {
    /// The axes of all that is no expert, slowest first.
    pub const DENSE: [Self; 6] = [Self::Pp, Self::DpReplicate, Self::DpShard, Self::Cp, Self::Sp, Self::Tp];
    /// The axes of the experts, slowest first.
    pub const EXPERT: [Self; 4] = [Self::Pp, Self::Edp, Self::Ep, Self::Etp];

    /// The axes whose degrees are given; the other follows.
    const GIVEN: [Self; 8] =
        [Self::Pp, Self::DpReplicate, Self::DpShard, Self::Cp, Self::Sp, Self::Tp, Self::Ep, Self::Etp];

    /// Returns the name that recipes and messages have for it.
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

/// How many ranks share the work along each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Degrees {
    /// Pipeline stages.
    pub pp: usize,
    /// Copies of everything.
    pub dp_replicate: usize,
    /// Shards of what data parallel ranks have in common.
    pub dp_shard: usize,
    /// Parts of a sequence in ring attention.
    pub cp: usize,
    /// Parts of a sequence in Ulysses attention.
    pub sp: usize,
    /// Parts of a matrix.
    pub tp: usize,
    /// Parts of the set of experts.
    pub ep: usize,
    /// Parts of an expert's matrix.
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

    /// Ranks of one pipeline stage.
    fn n_stage(&self) -> usize {
        self.dp_replicate * self.dp_shard * self.cp * self.sp * self.tp
    }
}

/// Degrees that make no mesh of a world.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// A degree is zero.
    #[error("{0}: expected a degree of at least 1, found 0")]
    Zero(&'static str),
    /// The degrees are of another number of ranks.
    #[error("{degrees} makes {wanted} ranks, and there are {n_ranks}")]
    WorldSize {
        /// What was asked for.
        degrees: Degrees,
        /// How many ranks that takes.
        wanted: usize,
        /// How many there are.
        n_ranks: usize,
    },
    /// The experts do not fold.
    #[error("ep {ep} x etp {etp} does not divide the {n_stage} ranks of a pipeline stage")]
    Experts {
        /// The degree of expert parallelism.
        ep: usize,
        /// The degree of tensor parallelism in experts.
        etp: usize,
        /// The ranks of one pipeline stage.
        n_stage: usize,
    },
}

/// The ranks of a world on their axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    degrees: Degrees,
}

impl Mesh {
    /// Lays `n_ranks` ranks out, all of them.
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

    /// Returns the place of `rank` along `axis`.
    pub fn coordinate(&self, rank: usize, axis: Axis) -> usize {
        rank / self.stride(axis) % self.degrees.of(axis)
    }

    /// Returns the ranks that differ along these axes only, a list for each group, each in the order of the ranks.
    ///
    /// # Panics
    ///
    /// If an axis of the experts comes with one that is none of theirs: no group is made of both.
    pub fn lists(&self, axes: &[Axis]) -> Vec<Vec<usize>> {
        let all: &[Axis] = match axes.iter().all(|axis| Axis::DENSE.contains(axis)) {
            true => &Axis::DENSE,
            false => &Axis::EXPERT,
        };
        assert!(axes.iter().all(|axis| all.contains(axis)), "{axes:?} are not axes of one kind");
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

    /// Makes the group of the ranks that differ from this one along these axes only. `world` is the group of all ranks; all
    /// of them ask for the same groups in the same order.
    pub fn group(&self, world: &dyn Collective, axes: &[Axis]) -> Result<Arc<dyn Collective>> {
        let name: Vec<&str> = axes.iter().map(|axis| axis.name()).collect();
        world.split(&name.join("-"), &self.lists(axes))
    }

    /// The distance of neighbours along an axis.
    fn stride(&self, axis: Axis) -> usize {
        let all: &[Axis] = if Axis::DENSE.contains(&axis) { &Axis::DENSE } else { &Axis::EXPERT };
        all.iter().rev().take_while(|other| **other != axis).map(|other| self.degrees.of(*other)).product()
    }
}

impl fmt::Display for Degrees {
    /// The degrees above one: `dp_shard 4 x tp 2`; those of the experts, who are on the same ranks, apart.
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

/// Ranks that a table shows.
const SHOWN: usize = 64;

/// A table: a line for each rank with its place on each axis that has more than one.
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

    /// Every mesh of up to 3 along each dense axis, at most 24 ranks, with all experts that fold.
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
    fn places_tell_ranks_apart_and_stay_in_their_degrees() {
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

    /// As Megatron-LM numbers them: tensor ranks are neighbours, pipeline stages farthest apart.
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
    fn a_mesh_is_shown_as_a_table_of_places() {
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
    fn degrees_that_make_no_mesh_are_refused_with_the_numbers() {
        let refused = |degrees: Degrees, n_ranks| Mesh::new(degrees, n_ranks).unwrap_err().to_string();
        let two = Degrees { dp_shard: 2, tp: 2, ..Degrees::default() };
        assert_eq!(refused(two, 8), "dp_shard 2 x tp 2 makes 4 ranks, and there are 8");
        assert_eq!(refused(Degrees::default(), 2), "one rank makes 1 ranks, and there are 2");
        assert_eq!(refused(Degrees { cp: 0, ..two }, 0), "cp: expected a degree of at least 1, found 0");
        let experts = Degrees { ep: 3, ..two };
        assert_eq!(refused(experts, 4), "ep 3 x etp 1 does not divide the 4 ranks of a pipeline stage");
    }

    #[test]
    #[should_panic(expected = "are not axes of one kind")]
    fn a_group_of_both_kinds_of_axes_is_refused() {
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
