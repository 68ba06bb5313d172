//! The groups of a mesh that training needs.

use std::sync::Arc;

use candle_core::Result;
use candlewick_comm::Collective;
use candlewick_comm::mesh::{Axis, Mesh};

use crate::params::{Sharded, Sharing};

/// This rank's groups. All ranks make them together.
#[derive(Clone)]
pub struct Groups {
    /// The ranks that see different tokens: losses and counts are summed over them.
    pub data: Arc<dyn Collective>,
    /// Those of them that keep a share each of what all have in common.
    pub shards: Arc<dyn Collective>,
    /// Those of them that keep the same share.
    pub replicas: Arc<dyn Collective>,
    /// Those that share the tokens of a micro-batch and exchange heads in attention.
    pub sequence: Arc<dyn Collective>,
    /// Those that share them and send each other keys and values.
    pub context: Arc<dyn Collective>,
}

impl Groups {
    /// Makes the groups of `mesh`; `world` is the group of all its ranks.
    pub fn new(mesh: &Mesh, world: &dyn Collective) -> Result<Self> {
        let shards = [Axis::DpShard, Axis::Cp, Axis::Sp];
        let data = [Axis::DpReplicate, Axis::DpShard, Axis::Cp, Axis::Sp];
        Ok(Self {
            data: mesh.group(world, &data)?,
            shards: mesh.group(world, &shards)?,
            replicas: mesh.group(world, &[Axis::DpReplicate])?,
            sequence: mesh.group(world, &[Axis::Sp])?,
            context: mesh.group(world, &[Axis::Cp])?,
        })
    }

    /// Returns how parameters are shared over these groups: each rank keeps all of them if nothing is sharded.
    pub fn sharing(&self, sharded: Option<Sharded>) -> Sharing {
        match sharded {
            Some(sharded) => {
                Sharing { sharded, shards: Arc::clone(&self.shards), replicas: Arc::clone(&self.replicas) }
            }
            None => Sharing { replicas: Arc::clone(&self.data), ..Sharing::alone() },
        }
    }
}
