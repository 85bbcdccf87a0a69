//! The store as a whole: what it promises, tried from outside its modules.
