// Package dataset gives the examples real data to train on: images with a
// label each, cut into a training part and a held-out part that no training
// step sees.
//
// [Digits] is in the program, so the examples need no other files. It has 1797
// scanned digits of 8x8 pixels (see NOTICE for the source and the licence).
package dataset
