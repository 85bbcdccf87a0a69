//! Files of the set that have another name now, or several.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::super::describe::FileId;
use super::super::file_comparison::Comparison;
use super::super::file_set::{Content, KeptFile, Kind};
use super::super::lost::{Lost, Why};
use super::Rollback;

impl Rollback {
    /// Finds the present names of files whose content exists nowhere else: logs that the job appends to and rotates,
    /// and large files.
    pub(super) fn find_renamed(&mut self, comparison: Comparison<'_>) {
        let is_elsewhere = |file: &KeptFile| match &file.kind {
            Kind::File { content, .. } => !matches!(content, Content::Kept { .. }),
            Kind::Folder | Kind::Link { .. } | Kind::Pipe | Kind::Socket => false,
        };
        let files = comparison.set.files.iter();
        let wanted =
            files.filter(|(path, file)| is_elsewhere(file) && !self.shared.contains(*path));
        let is_moved = |path: &Path, file: &KeptFile| {
            let now = comparison.now(path);
            !now.is_some_and(|now| file.is_same_file(&now))
        };
        let wanted: HashMap<_, _> = wanted
            .filter(|(path, file)| is_moved(path, file))
            .map(|(path, file)| (file.id(), (path, file)))
            .collect();
        if wanted.is_empty() {
            return;
        }
        let replaced = self.put_back.iter().map(|(path, _)| path);
        let sources: BTreeSet<PathBuf> = self.aside.iter().chain(replaced).cloned().collect();
        for from in sources {
            let Some(now) = comparison.now(&from).filter(|now| !now.is_special()) else {
                continue;
            };
            let Some((to, then)) = wanted.get(&now.id()) else {
                continue;
            };
            let is_whole = then.is_appended() || then.has_same_content(&now);
            let is_planned = self.put_back.iter().any(|(path, _)| path == *to);
            let is_spare = then.is_appended() && is_planned;
            if !is_whole || is_spare || self.moves.iter().any(|(_, taken)| taken == *to) {
                continue;
            }
            let others = |path: &Path| comparison.is_by_others(path, then, Some(&now));
            if then.is_appended() && (others(&from) || others(to)) {
                self.lose(to, Why::OthersToo);
                continue;
            }
            self.aside.retain(|path| *path != from);
            let stays = |lost: &Lost| lost.path != **to || lost.why == Why::Owner;
            self.lost.retain(stays);
            // Only the name and the attributes are restored.
            if !then.is_appended() && !is_planned {
                self.put_back.push(((*to).clone(), (*then).clone()));
            }
            self.moves.push((from, (*to).clone()));
        }
        self.put_back.sort_by(|left, right| left.0.cmp(&right.0));
    }

    /// Finds names that stay as they are, of files of which another name is restored: the file is that of the snapshot and
    /// has not changed, or another program has changed it, or only appended data is cut off.
    pub(super) fn find_siblings(&mut self, comparison: Comparison<'_>) {
        let put_back = self.put_back.iter();
        let planned: HashMap<&Path, FileId> = put_back
            .filter(|(_, file)| matches!(file.kind, Kind::File { .. }))
            .map(|(path, file)| (path.as_path(), file.id()))
            .collect();
        let wanted: HashSet<FileId> = planned.values().copied().collect();
        let stays = |path: &Path, file: &KeptFile| {
            if self.moves.iter().any(|(_, to)| to == path) {
                return true;
            }
            let is_right = |now: &KeptFile| {
                let is_jobs = comparison.written_files.contains(&now.id());
                // An earlier restore may have created the file.
                file.has_same_content(now) && !file.is_mapped
                    || file.is_same_file(now) && (file.is_appended() || !is_jobs)
            };
            comparison.now(path).is_some_and(|now| is_right(&now))
                && self.lost.iter().all(|lost| lost.path != path)
        };
        let files = comparison.set.files.iter();
        let stay = files.filter(|(path, file)| {
            let is_wanted = wanted.contains(&file.id()) && !planned.contains_key(path.as_path());
            is_wanted && stays(path, file)
        });
        let siblings = stay.map(|(path, file)| (file.id(), path.clone()));
        self.siblings = siblings.collect();
    }
}
