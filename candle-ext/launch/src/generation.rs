//! A generation of the worker group: its participants, and the environment variables of its workers.

use crate::plan::LaunchPlan;
use candlewick_comm::rank_env::{Master, Variables};
use candlewick_comm::store::StoreSecret;

/// The result of one rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Number of the generation, from 0.
    pub number: usize,
    /// Rank of this node among the participants.
    pub group_rank: usize,
    /// Participants, ordered by group rank.
    pub participants: Vec<Participant>,
    /// Address of the workers' store.
    pub master: Master,
    /// Secret of the workers' store.
    pub store_secret: Option<StoreSecret>,
}

/// A node of a generation.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Participant {
    /// Host name or address of the node.
    pub host: String,
    /// Number of its workers.
    pub n_workers: usize,
    /// Role of its workers.
    pub role: String,
}

impl Generation {
    /// Returns the number of workers on all nodes.
    pub fn world_size(&self) -> usize {
        self.participants.iter().map(|participant| participant.n_workers).sum()
    }

    /// Returns the global rank of a worker of this node. Ranks are ordered by group rank, then by local rank.
    pub fn rank(&self, local_rank: usize) -> usize {
        let before = &self.participants[..self.group_rank];
        before.iter().map(|participant| participant.n_workers).sum::<usize>() + local_rank
    }

    /// Returns the rank and the world size among the workers of the same role.
    fn rank_in_role(&self, local_rank: usize) -> (usize, usize) {
        let role = &self.participants[self.group_rank].role;
        let count = |participants: &[Participant]| {
            participants
                .iter()
                .filter(|participant| participant.role == *role)
                .map(|participant| participant.n_workers)
                .sum::<usize>()
        };
        (count(&self.participants[..self.group_rank]) + local_rank, count(&self.participants))
    }
}

/// Returns the variables that one worker gets in addition to `inherited`, the launcher's environment.
pub fn worker_variables(
    plan: &LaunchPlan,
    generation: &Generation,
    restart: usize,
    local_rank: usize,
    inherited: &Variables,
) -> Variables {
    let (role_rank, role_world_size) = generation.rank_in_role(local_rank);
    let shown_local_rank = if plan.virtual_local_rank { 0 } else { local_rank };
    let agent = if generation.master.agent_hosts_store { "True" } else { "False" };
    let mut variables = Variables::new();
    let mut set = |name: &str, value: &dyn ToString| drop(variables.insert(name.to_owned(), value.to_string()));
    set("RANK", &generation.rank(local_rank));
    set("LOCAL_RANK", &shown_local_rank);
    set("WORLD_SIZE", &generation.world_size());
    set("LOCAL_WORLD_SIZE", &plan.local_world_size);
    set("GROUP_RANK", &generation.group_rank);
    set("GROUP_WORLD_SIZE", &generation.participants.len());
    set("ROLE_NAME", &plan.role);
    set("ROLE_RANK", &role_rank);
    set("ROLE_WORLD_SIZE", &role_world_size);
    set("MASTER_ADDR", &generation.master.addr);
    set("MASTER_PORT", &generation.master.port);
    if let Some(secret) = &generation.store_secret {
        set(StoreSecret::VARIABLE, &secret.text());
    }
    set("TORCHELASTIC_RESTART_COUNT", &restart);
    set("TORCHELASTIC_MAX_RESTARTS", &plan.max_restarts);
    set("TORCHELASTIC_RUN_ID", &plan.run_id);
    set("TORCHELASTIC_SIGNALS_TO_HANDLE", &plan.signals.text);
    set("TORCHELASTIC_USE_AGENT_STORE", &agent);
    if !inherited.contains_key("TORCH_NCCL_ASYNC_ERROR_HANDLING") {
        set("TORCH_NCCL_ASYNC_ERROR_HANDLING", &1);
    }
    if plan.virtual_local_rank {
        set("CUDA_VISIBLE_DEVICES", &only_gpu(local_rank, inherited));
    }
    plan.threads.iter().for_each(|(name, value)| set(name, value));
    variables
}

/// Returns the entry of `CUDA_VISIBLE_DEVICES` of one worker.
fn only_gpu(local_rank: usize, inherited: &Variables) -> String {
    let listed = inherited.get("CUDA_VISIBLE_DEVICES").and_then(|list| list.split(',').nth(local_rank));
    listed.map_or_else(|| local_rank.to_string(), |gpu| gpu.trim().to_owned())
}

/// Returns the command of one worker, with `${local_rank}` replaced in its arguments.
pub fn worker_command(plan: &LaunchPlan, local_rank: usize) -> Vec<String> {
    let number = local_rank.to_string();
    let mut words = plan.command.clone();
    words.iter_mut().skip(1).for_each(|word| *word = word.replace("${local_rank}", &number));
    words
}

/// Returns the prefix of a worker's output lines.
pub fn line_prefix(plan: &LaunchPlan, generation: &Generation, local_rank: usize) -> String {
    let template = plan.output.prefix.replace("${role_name}", &plan.role);
    let template = template.replace("${local_rank}", &local_rank.to_string());
    template.replace("${rank}", &generation.rank(local_rank).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn participant(n_workers: usize, role: &str) -> Participant {
        Participant { host: "h".into(), n_workers, role: role.into() }
    }

    #[test]
    fn ranks_follow_node_order_and_role_ranks_count_per_role() {
        let participants = vec![participant(2, "actor"), participant(3, "critic"), participant(1, "actor")];
        let master = Master { addr: "h".into(), port: 1, agent_hosts_store: true };
        let generation = |group_rank| Generation {
            number: 0,
            group_rank,
            participants: participants.clone(),
            master: master.clone(),
            store_secret: None,
        };
        assert_eq!(generation(0).world_size(), 6);
        assert_eq!([generation(0).rank(1), generation(1).rank(0), generation(2).rank(0)], [1, 2, 5]);
        assert_eq!([generation(1).rank_in_role(2), generation(2).rank_in_role(0)], [(2, 3), (2, 3)]);
    }
}
