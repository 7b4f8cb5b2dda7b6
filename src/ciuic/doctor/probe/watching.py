"""`ciuic.doctor.watch`: the doctor in a program that was not started by `ciuic doctor run`."""
