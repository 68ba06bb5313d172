//! What the nodes agreed on before they start workers, and the variables that a worker gets from it.

use crate::plan::Plan;
use candlewick_comm::place::{Master, Variables};

/// One meeting of the nodes: who takes part, in which order, with how many workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Round {
    /// The number of this node.
    pub group_rank: usize,
    /// The nodes in the order of their numbers.
    pub members: Vec<Member>,
    /// Where the workers meet.
    pub master: Master,
}

/// A node that takes part.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Member {
    /// Its name.
    pub host: String,
    /// How many workers it starts.
    pub n_workers: usize,
    /// What its workers are called.
    pub role: String,
}

impl Round {
    /// Returns the number of workers of all nodes.
    pub fn world_size(&self) -> usize {
        self.members.iter().map(|member| member.n_workers).sum()
    }

    /// Returns the rank of one of this node's workers: those of the nodes before it come first.
    pub fn rank(&self, local_rank: usize) -> usize {
        let before = &self.members[..self.group_rank];
        before.iter().map(|member| member.n_workers).sum::<usize>() + local_rank
    }

    /// Returns the rank among the workers of the same name, and how many those are.
    fn rank_in_role(&self, local_rank: usize) -> (usize, usize) {
        let role = &self.members[self.group_rank].role;
        let count = |members: &[Member]| {
            members.iter().filter(|member| member.role == *role).map(|member| member.n_workers).sum::<usize>()
        };
        (count(&self.members[..self.group_rank]) + local_rank, count(&self.members))
    }
}

/// Returns the variables of one worker, beside those that it inherits. `inherited` are the launcher's own.
pub fn worker_variables(
    plan: &Plan,
    round: &Round,
    restart: usize,
    local_rank: usize,
    inherited: &Variables,
) -> Variables {
    let (role_rank, role_world_size) = round.rank_in_role(local_rank);
    let shown_local_rank = if plan.virtual_local_rank { 0 } else { local_rank };
    let agent = if round.master.agent_hosts_store { "True" } else { "False" };
    let mut variables = Variables::new();
    let mut set = |name: &str, value: &dyn ToString| drop(variables.insert(name.to_owned(), value.to_string()));
    set("RANK", &round.rank(local_rank));
    set("LOCAL_RANK", &shown_local_rank);
    set("WORLD_SIZE", &round.world_size());
    set("LOCAL_WORLD_SIZE", &plan.local_world_size);
    set("GROUP_RANK", &round.group_rank);
    set("GROUP_WORLD_SIZE", &round.members.len());
    set("ROLE_NAME", &plan.role);
    set("ROLE_RANK", &role_rank);
    set("ROLE_WORLD_SIZE", &role_world_size);
    set("MASTER_ADDR", &round.master.addr);
    set("MASTER_PORT", &round.master.port);
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

/// The GPU of one worker: its entry among those that the launcher may see.
fn only_gpu(local_rank: usize, inherited: &Variables) -> String {
    let listed = inherited.get("CUDA_VISIBLE_DEVICES").and_then(|list| list.split(',').nth(local_rank));
    listed.map_or_else(|| local_rank.to_string(), |gpu| gpu.trim().to_owned())
}

/// Returns the program and its arguments for one worker: `${local_rank}` is replaced.
pub fn worker_command(plan: &Plan, local_rank: usize) -> Vec<String> {
    let number = local_rank.to_string();
    let mut words = plan.command.clone();
    words.iter_mut().skip(1).for_each(|word| *word = word.replace("${local_rank}", &number));
    words
}

/// Returns what stands before a worker's lines.
pub fn line_prefix(plan: &Plan, round: &Round, local_rank: usize) -> String {
    let template = plan.output.prefix.replace("${role_name}", &plan.role);
    let template = template.replace("${local_rank}", &local_rank.to_string());
    template.replace("${rank}", &round.rank(local_rank).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(n_workers: usize, role: &str) -> Member {
        Member { host: "h".into(), n_workers, role: role.into() }
    }

    #[test]
    fn ranks_follow_the_nodes_and_roles_count_apart() {
        let members = vec![member(2, "actor"), member(3, "critic"), member(1, "actor")];
        let master = Master { addr: "h".into(), port: 1, agent_hosts_store: true };
        let round = |group_rank| Round { group_rank, members: members.clone(), master: master.clone() };
        assert_eq!(round(0).world_size(), 6);
        assert_eq!([round(0).rank(1), round(1).rank(0), round(2).rank(0)], [1, 2, 5]);
        assert_eq!([round(1).rank_in_role(2), round(2).rank_in_role(0)], [(2, 3), (2, 3)]);
    }
}
